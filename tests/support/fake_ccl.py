"""A process group that carries tensors of the fake device only, as NCCL and HCCL carry their device's.

A broadcast comes after what is queued on the device, and waiting for it lets the device wait, not the host: whoever
reads a target without waiting for the device as well sees old bytes. Everything but broadcasts is refused, so nothing
gets on the device by accident.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from tests.support.fake_device import MODULE, NAME, STATE, shadow

BACKEND: Final = "fakeccl"


class _Work:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        MODULE.current_stream().enqueue(self._work.wait)
        return True

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done


class FakeCcl(dist.ProcessGroup):
    """Sends what lies behind the device's memory over gloo."""

    @property
    def group_name(self) -> str:
        # torch keeps it beside groups that are not made of backends of its own, and asks once more when they are gone.
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._name = ""
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Any:
        (tensor,) = tensors
        if tensor.device.type != NAME:
            raise RuntimeError(f"{BACKEND} carries tensors on {NAME} only, found one on {tensor.device}")
        STATE.note(f"broadcast {tensor.numel() * tensor.element_size()} bytes")
        stream = MODULE.current_stream()
        stream.run(stream.begun)
        return _Work(self._gloo.broadcast([shadow(tensor)], options))

    def shutdown(self) -> None:
        return

    def __getattribute__(self, name: str) -> Any:
        if name in {"allreduce", "allgather", "send", "recv", "gather", "scatter", "reduce_scatter", "alltoall"}:
            raise AssertionError(f"{name} was asked of a group that carries device tensors only")
        return super().__getattribute__(name)


def register() -> None:
    """Let torch make such groups as `npu:fakeccl`."""
    dist.Backend.register_backend(BACKEND, FakeCcl, devices=[NAME])
