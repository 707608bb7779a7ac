"""Devices' tensors into memory that other processes share, while the trainer waits.

Where the device's runtime can page-lock memory that is there already, the shared memory is locked once and copies go
straight into it, all of them in one go. Elsewhere, and for tensors whose elements are not in a row, they go through the
page-locked memory of a download, and one more copy on the host.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from hpdcp._base.timing import log_message
from hpdcp._devices.copies import Downloads, Landing, lane
from hpdcp._devices.device import SUB_BYTE_DTYPES, copy_into, device_module, tensor_over

_PORTABLE: Final = 1
"""Locked for every device of the process."""


def lock_pages(memory: memoryview, device: torch.device) -> Callable[[], object] | None:
    """Page-lock memory that is there already, for copies from and to `device`; what unlocks it again.

    None where that cannot be had. torch 2.13 has no call for it that fits every device, only the runtime of CUDA and
    ROCm, which `torch.cuda` shows: a device module that shows no such runtime has none, as that of `torch_npu`.
    """
    runtime: Any = getattr(device_module(device), "cudart", lambda: None)()
    if not len(memory) or not hasattr(runtime, "cudaHostRegister"):
        return None
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    status = int(runtime.cudaHostRegister(address, len(memory), _PORTABLE))
    if status:
        _forget_error(device)
        _say_once(
            f"{len(memory)} bytes of shared memory could not be page-locked for {device.type} (error {status}): "
            "asynchronous saves copy once more on the host. Look at the container's memory limit."
        )
        return None
    return functools.partial(runtime.cudaHostUnregister, address)


def _forget_error(device: torch.device) -> None:
    """The runtime keeps the error of a call for whoever asks next, which would be some kernel of the trainer's."""
    try:
        torch.empty(1, dtype=torch.uint8, device=device).zero_()
    except RuntimeError:
        return


class DeviceCopies:
    """Copies from devices into host memory, begun at once and done when `finish` returns.

    Args:
        places: the memory for each source, and whether it is page-locked.
        sources: device tensors.
    """

    def __init__(self, places: Sequence[tuple[memoryview, bool]], sources: Sequence[torch.Tensor]) -> None:
        self._rest: list[tuple[memoryview, torch.Tensor]] = []
        self._landings: list[Landing] = []
        used = {source.device: lane(source.device) for source in sources}
        for one in used.values():
            one.follow()
        try:
            for (memory, locked), source in zip(places, sources, strict=True):
                in_a_row = source.is_contiguous() and not (source.is_conj() or source.is_neg())
                if not len(memory):
                    continue
                if not (locked and in_a_row):
                    self._rest.append((memory, source))
                    continue
                if source.dtype in SUB_BYTE_DTYPES:
                    source = source.view(torch.uint8)
                target = tensor_over(memory).view(source.dtype).view(source.shape)
                used[source.device].copy(target, source, non_blocking=True)
        except BaseException:
            self._rest = []
            self._landings = [one.mark() for one in used.values()]
            self.finish()
            raise
        self._landings = [one.mark() for one in used.values()]

    def finish(self) -> None:
        """Return when every source may be changed and all memory holds what it is to hold."""
        try:
            filled = dict.fromkeys(range(len(self._rest)), 0)
            sources = ((number, source) for number, (_, source) in enumerate(self._rest))
            for number, part in Downloads[int](window=0).on_host(sources):
                start = filled[number]
                filled[number] += len(part)
                copy_into(tensor_over(self._rest[number][0][start : filled[number]]), part)
        finally:
            for landing in self._landings:
                landing.synchronize()


@functools.cache
def _say_once(text: str) -> None:
    log_message(logging.WARNING, text)
