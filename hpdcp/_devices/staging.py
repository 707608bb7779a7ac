"""Tensors into memory that other processes share, while the trainer waits.

What is on the host is copied by several threads. From a device whose runtime can page-lock memory that is there
already, copies go straight into the shared memory, which is locked once, all of them in one go. Elsewhere, and for
tensors whose elements are not in a row, they go through the page-locked memory of a download, and one more copy on the
host.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from hpdcp._base.backend import spare_cores
from hpdcp._base.splitting import cut_rows
from hpdcp._base.timing import log_once
from hpdcp._devices.device import SUB_BYTE_DTYPES, copy_into, device_module, tensor_over
from hpdcp._devices.downloads import Downloads
from hpdcp._devices.streams import CopyEvent, copy_stream

_PORTABLE: Final = 1
"""Locked for every device of the process."""
_COPY_BYTES: Final = 16 << 20
"""What one thread copies at a time."""


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
        log_once(
            logging.WARNING,
            f"{len(memory)} bytes of shared memory could not be page-locked for {device.type} (error {status}): "
            "asynchronous saves copy once more on the host. Look at the container's memory limit.",
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
        targets: the memory for each source, and whether it is page-locked.
        sources: device tensors.
    """

    def __init__(self, targets: Sequence[tuple[memoryview, bool]], sources: Sequence[torch.Tensor]) -> None:
        self._rest: list[tuple[memoryview, torch.Tensor]] = []
        self._events: list[CopyEvent] = []
        used = {source.device: copy_stream(source.device) for source in sources}
        for stream in used.values():
            stream.follow()
        try:
            for (memory, locked), source in zip(targets, sources, strict=True):
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
            self._events = [stream.record_event() for stream in used.values()]
            self.finish()
            raise
        self._events = [stream.record_event() for stream in used.values()]

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
            for event in self._events:
                event.synchronize()


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source into its target with every core this process may use; return when all is copied."""
    pieces = [piece for target, source in pairs for piece in _pieces(target, source)]
    threads = min(spare_cores(), len(pieces))
    position = iter(range(len(pieces)))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            with lock:
                number = next(position, None)
            if number is None:
                return
            try:
                copy_into(*pieces[number])
            except BaseException as error:  # noqa: BLE001  # raised again in the calling thread
                failures.append(error)

    helpers = [threading.Thread(target=work, name="hpdcp-staging") for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def _pieces(target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One copy cut into rows, for several threads; whole where it is small."""
    nbytes = target.numel() * target.element_size()
    if nbytes <= _COPY_BYTES or target.dim() == 0:
        return [(target, source)]
    axis, rows = cut_rows(target.shape, _COPY_BYTES // target.element_size())
    return [(target.narrow(axis, start, length), source.narrow(axis, start, length)) for start, length in rows]
