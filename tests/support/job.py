"""A job of several ranks, as the tests under torchrun see it: its device, its meshes, and steps that cannot hang."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpdcp._devices.device import device_module
from tests.support.devices import named_device

_GROUP_TIMEOUT: Final = timedelta(seconds=60)
"""A collective that some rank never reaches ends here, long before the time limit of the whole run."""
_REPORT_SECONDS: Final = 90
"""Longer than the group's, so that a rank stuck in a collective can still report it."""


class AnotherRankFailedError(Exception):
    """Raised where ranks meet, on those that are well."""


@dataclass(repr=False)
class Job:
    """This rank's view of the job. Everything but the meshes goes through the rendezvous store, not the process group:
    a rank that fell out of step can still be told apart from one that hangs."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store
    _meshes: dict[tuple[tuple[int, ...], tuple[int, ...]], DeviceMesh] = field(default_factory=dict)
    _phase: str = ""
    _steps: int = 0

    def enter(self, phase: str) -> None:
        """Count steps from one again, under a name of their own: what a rank left out before has no effect any more."""
        self._phase, self._steps = phase, 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in order of rank, on every rank; raises as soon as a rank has left the phase."""
        self._steps += 1
        return self._exchange(f"{self._phase}/{self._steps}", value, may_leave=True)

    def leave(self, outcome: str | None) -> list[str | None]:
        """End the phase, with what went wrong in it; every rank's outcome, once all have ended it."""
        if outcome is not None:
            self.store.set(f"{self._phase}/left", str(self.rank))
        return self._exchange(f"{self._phase}/outcome", outcome, may_leave=False)

    def _exchange(self, step: str, value: Any, *, may_leave: bool) -> list[Any]:
        self.store.set(f"{step}/{self.rank}", pickle.dumps(value))
        keys = [f"{step}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + _REPORT_SECONDS
        while True:
            try:
                self.store.wait(keys, timedelta(seconds=1))
            except dist.DistStoreError:
                if may_leave and self.store.check([f"{self._phase}/left"]):
                    raise AnotherRankFailedError from None
                if time.monotonic() > deadline:
                    raise
            else:
                return [pickle.loads(self.store.get(key)) for key in keys]

    def share(self, value: Any) -> Any:
        """Rank 0's `value` on every rank."""
        return self.gather(value)[0]

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self.gather(None)

    def mesh(self, *shape: int, ranks: Sequence[int] | None = None) -> DeviceMesh:
        """A mesh of that shape over `ranks`, all of them by default; made once, by all ranks together."""
        members = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        if (shape, members) not in self._meshes:
            names = tuple(f"axis{axis}" for axis in range(len(shape)))
            grid = torch.tensor(members).reshape(shape)
            self._meshes[shape, members] = DeviceMesh(self.device.type, grid, mesh_dim_names=names)
        return self._meshes[shape, members]

    def sentinel(self) -> float:
        """What a target is filled with before a load: it differs from rank to rank, and no test stores it."""
        return -1000.0 - self.rank

    def errors(self, action: Callable[[], object]) -> list[BaseException | None]:
        """What `action`, run on all ranks, raised on each; None where it returned."""
        mine: BaseException | None = None
        try:
            action()
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks compare theirs with it
            mine = error
        kinds = self.gather((mine, None if mine is None else str(mine)))
        return [error for error, _ in kinds]


@contextmanager
def job() -> Iterator[Job]:
    """Join the ranks that torchrun started; leaves the process group again at the end."""
    kind = os.environ.get("HYPER_PARALLEL_TEST_DEVICE_TYPE", "cpu")
    device = named_device(kind)
    if kind != "cpu":
        module = device_module(device)
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % module.device_count())
        module.set_device(device)
    backend = dist.get_default_backend_for_device(kind)
    # A test of jobs whose default group carries tensors of the device only says so before it joins.
    both = backend if kind == "cpu" else f"cpu:gloo,{kind}:{backend}"
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=_GROUP_TIMEOUT)))
    dist.init_process_group(
        os.environ.get("HPDCP_TEST_GROUP_BACKEND", both),
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=_GROUP_TIMEOUT,
    )
    try:
        yield Job(rank, world_size, device, dist.PrefixStore("job", store))
    finally:
        dist.destroy_process_group()
