"""Boxes of stored chunks into local tensors: one engine for every backend.

Boxes become requests for ranges, in the order of the files' bytes. A range that lies in one run in the file and in the
target, in one dtype and on the host, is read straight into the target's memory; any other passes through a map of the
file where the backend has one, or through memory of the engine's own. Ranges of one file are asked for together, so
that the backend can fetch them at once and join what lies close. Across a network a window of at most `SLAB_BYTES` is
asked for at a time, several windows at once: while one is checked and copied, others are in flight.

What goes to a device is read into page-locked memory, two buffers of it in turn for each thread that reads: while one
is filled, the other's contents are being copied to the device, on a stream of their own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._devices import device
from hpdcp._devices.streams import follow_all
from hpdcp._devices.uploads import BounceBuffers
from hpdcp._files.block_checker import BlockChecker
from hpdcp._files.box_reads import BoxRead, RangeRequest, range_requests, windows_of
from hpdcp._files.parallel import for_each_file, in_parallel
from hpdcp._format.metadata import StorageInfo

CONCURRENT_WINDOWS: Final = 4
"""Windows in flight across a network; with requests of 8 MiB that makes 16 of them."""
_ALIGNMENT: Final = 64


def read_boxes(backend: Backend, reads: Sequence[BoxRead], checker: BlockChecker | None) -> None:
    """Fill every target.

    Raises:
        CorruptCheckpointError: a file is shorter than recorded, or `checker` found a block that differs.
        StorageError: the store failed; targets are undefined.
    """
    in_file_order = sorted(reads, key=lambda read: (read.stored.key, read.stored.offset, read.box.offsets))
    requests = (request for read in in_file_order for request in range_requests(read, cut=backend.remote))
    windows = list(windows_of(requests, bounded=backend.remote))
    workers = min(CONCURRENT_WINDOWS if backend.remote else 1, len(windows))
    rest = iter(windows)
    lock = threading.Lock()
    failed = threading.Event()
    # Here, in the caller's thread, since what a device does next is a matter of the thread that asks.
    follow_all({read.target.device for read in reads if not device.is_host(read.target)})

    def work(_: int) -> None:
        with contextlib.closing(_WindowReader(backend, checker)) as window_reader:
            while not failed.is_set():
                with lock:
                    window = next(rest, None)
                if window is None:
                    return
                try:
                    window_reader.read(window)
                except BaseException:
                    failed.set()
                    raise

    in_parallel(work, range(workers), threads=workers, failed=failed)


def read_extents(backend: Backend, extents: Sequence[StorageInfo]) -> list[bytearray]:
    """The bytes of each extent; small ones, since all are held at once.

    Raises:
        StorageError: the store failed, or a file is shorter than recorded.
    """
    found = [bytearray(stored.length) for stored in extents]
    by_key: dict[str, list[int]] = {}
    for position, stored in enumerate(extents):
        by_key.setdefault(stored.key, []).append(position)

    def read(key: str) -> None:
        positions = by_key[key]
        ranges = [ByteRange(extents[position].offset, extents[position].length) for position in positions]
        backend.read_ranges(key, ranges, [memoryview(found[position]) for position in positions])

    for_each_file(backend, read, list(by_key))
    return found


class _WindowReader:
    """Reads windows one after another in one memory for detours, since fresh memory costs more than the copy does."""

    def __init__(self, backend: Backend, checker: BlockChecker | None) -> None:
        self._backend = backend
        self._checker = checker
        self._memory = np.empty(0, np.uint8)
        self._bounce = BounceBuffers()

    def close(self) -> None:
        """Return when everything has reached its target, on devices as well."""
        self._bounce.drain()

    def read(self, window: Sequence[RangeRequest]) -> None:
        """Fill the targets of requests for one file."""
        key = window[0].read.stored.key
        asked: list[tuple[RangeRequest, memoryview]] = []
        detours: list[RangeRequest] = []
        to_devices: list[RangeRequest] = []
        for request in window:
            if request.into is not None:
                asked.append((request, request.into))
            elif not device.is_host(request.read.target):
                # Not from a map of the file, which a device's driver would copy page by page, and blocking.
                to_devices.append(request)
            elif (mapped := self._backend.map_range(key, request.range)) is not None:
                self._finish(request, mapped)
            else:
                detours.append(request)
        asked += zip(detours, self._memory_for(detours, self._own_memory), strict=True)
        asked += zip(to_devices, self._memory_for(to_devices, self._bounce.take), strict=True)
        if asked:
            self._backend.read_ranges(key, [request.range for request, _ in asked], [view for _, view in asked])
        for request, view in asked:
            self._finish(request, view)
        if to_devices:
            self._bounce.mark()

    def _own_memory(self, nbytes: int) -> memoryview:
        if nbytes > len(self._memory):
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory.data

    def _memory_for(self, requests: Sequence[RangeRequest], memory: Callable[[int], memoryview]) -> list[memoryview]:
        if not requests:
            return []
        lengths = [request.range.length for request in requests]
        rounded = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
        whole = memory(sum(rounded))
        starts = np.cumsum([0, *rounded]).tolist()
        return [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]

    def _finish(self, request: RangeRequest, view: memoryview) -> None:
        if self._checker is not None:
            stored = request.read.stored
            self._checker.check(stored, request.read.fqn, request.range.offset - stored.offset, view)
        if request.deliver is not None:
            copy = device.copy_into if device.is_host(request.read.target) else self._bounce.copy
            request.deliver(_typed(view, request.read.dtype), copy)


def _typed(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes as a flat tensor that is only ever copied from; a copy where they are not aligned for the dtype."""
    array = np.frombuffer(view, dtype=np.uint8)
    if array.ctypes.data % dtype.itemsize:
        array = array.copy()
    return device.tensor_over(array.data).view(dtype)
