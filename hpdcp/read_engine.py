"""Boxes of stored chunks into local tensors: one engine for every backend.

Reads go file by file, in the order of the bytes. Whatever lies in one run in the file and in the target, in one dtype
and on the host, is read straight into the target's memory; everything else passes through a map of the file where the
backend has one, or through a buffer of at most `SLAB_BYTES`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import crc32c
import numpy as np
import torch

from hpdcp import device
from hpdcp.backend import Backend, ByteRange
from hpdcp.errors import CorruptCheckpointError
from hpdcp.geometry import Box, flat_start, is_contiguous, row_runs
from hpdcp.metadata import BLOCK_BYTES, StorageInfo

SLAB_BYTES = 32 << 20
"""Most host memory that one read through a buffer takes."""
_LONG_RUN_BYTES = 64 << 10
"""From here on a run is worth a request of its own, even where the file could be mapped."""


@dataclass(frozen=True, slots=True)
class BoxRead:
    """One box of a stored chunk, and where it goes."""

    fqn: str
    """For messages."""
    stored: StorageInfo
    dtype: torch.dtype
    """Of the stored elements."""
    sizes: tuple[int, ...]
    """The stored chunk's."""
    box: Box
    """What to read, in the stored chunk's own coordinates."""
    target: torch.Tensor
    """Shaped `box.sizes`; any device, dtype, strides."""


class Checker:
    """Compares blocks of stored extents with their checksums."""

    def __init__(self, backend: Backend, *, partial_blocks: bool) -> None:
        self._backend = backend
        self._partial_blocks = partial_blocks
        self._checked: set[tuple[str, int, int]] = set()

    def check(self, stored: StorageInfo, fqn: str, start: int, data: memoryview) -> None:
        """Check `data`, which is what the extent holds from byte `start` of it on.

        Blocks that `data` holds in full are compared; with `partial_blocks`, the others it touches are read for it.
        """
        stop = start + len(data)
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, stored.length)
            if (stored.key, stored.offset, block) in self._checked:
                continue
            if start <= low and high <= stop:
                found = crc32c.crc32c(data[low - start : high - start])
            elif self._partial_blocks:
                whole = bytearray(high - low)
                self._backend.read_ranges(stored.key, [ByteRange(stored.offset + low, len(whole))], [memoryview(whole)])
                found = crc32c.crc32c(whole)
            else:
                continue
            if found != stored.checksums[block]:
                raise CorruptCheckpointError(
                    f"{stored.key!r} in {self._backend.url} is damaged: bytes {stored.offset + low} to "
                    f"{stored.offset + high}, of {fqn!r}, have checksum {found:08x}, recorded was "
                    f"{stored.checksums[block]:08x}. Load another checkpoint; targets read so far are undefined."
                )
            self._checked.add((stored.key, stored.offset, block))


def read_boxes(backend: Backend, reads: Sequence[BoxRead], checker: Checker | None) -> None:
    """Fill every target.

    Raises:
        CorruptCheckpointError: a file is shorter than recorded, or `checker` found a block that differs.
        StorageError: the store failed; targets are undefined.
    """
    in_file_order = sorted(reads, key=lambda read: (read.stored.key, read.stored.offset, read.box.offsets))
    for key, group in itertools.groupby(in_file_order, key=lambda read: read.stored.key):
        straight: list[tuple[BoxRead, ByteRange, memoryview]] = []
        others: list[BoxRead] = []
        for read in group:
            pieces = _straight_pieces(read)
            if pieces is None:
                others.append(read)
            else:
                straight += [(read, *piece) for piece in pieces]
        if straight:
            backend.read_ranges(key, [range_ for _, range_, _ in straight], [into for _, _, into in straight])
            if checker is not None:
                for read, range_, into in straight:
                    checker.check(read.stored, read.fqn, range_.offset - read.stored.offset, into)
        for read in others:
            _read_through(backend, read, checker)


def _straight_pieces(read: BoxRead) -> list[tuple[ByteRange, memoryview]] | None:
    """The runs of the file that can be read straight into the target; None where it takes a detour."""
    target = read.target
    if target.dtype != read.dtype or not device.is_host(target) or not target.is_contiguous():
        return None
    if target.is_conj() or target.is_neg():
        return None
    itemsize = read.dtype.itemsize
    memory = device.host_bytes(target)
    if is_contiguous(read.box, read.sizes):
        start = read.stored.offset + flat_start(read.box, read.sizes) * itemsize
        return [(ByteRange(start, len(memory)), memory)] if len(memory) else []
    starts, elements = row_runs(read.box, read.sizes)
    run = elements * itemsize
    if run < _LONG_RUN_BYTES:
        return None
    return [
        (ByteRange(read.stored.offset + start * itemsize, run), memory[i * run : (i + 1) * run])
        for i, start in enumerate(starts.tolist())
    ]


def _read_through(backend: Backend, read: BoxRead, checker: Checker | None) -> None:
    """Read slab by slab, each the span from its first element to its last, and copy what is wanted out of it."""
    itemsize = read.dtype.itemsize
    strides = _row_major(read.sizes)
    for slab in _slabs(read.box, strides, max(1, SLAB_BYTES // itemsize)):
        first = flat_start(slab, read.sizes)
        elements = _span(slab, strides)
        if elements == 0:
            continue
        range_ = ByteRange(read.stored.offset + first * itemsize, elements * itemsize)
        view = backend.map_range(read.stored.key, range_)
        if view is None:
            view = memoryview(bytearray(range_.length))
            backend.read_ranges(read.stored.key, [range_], [view])
        if checker is not None:
            checker.check(read.stored, read.fqn, first * itemsize, view)
        source = _typed(view, read.dtype).as_strided(slab.sizes, strides)
        begin = tuple(a - b for a, b in zip(slab.offsets, read.box.offsets, strict=True))
        target = read.target
        for axis, (start, size) in enumerate(zip(begin, slab.sizes, strict=True)):
            target = target.narrow(axis, start, size)
        device.copy_into(target, source)


def _typed(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes as a flat tensor that is only ever copied from; a copy where they are not aligned for the dtype."""
    array = np.frombuffer(view, dtype=np.uint8)
    if array.ctypes.data % dtype.itemsize:
        array = array.copy()
    return device.tensor_over(array.data).view(dtype)


def _slabs(box: Box, strides: tuple[int, ...], most: int) -> Iterator[Box]:
    """Parts of `box`, in order, none of which spans more than `most` elements unless it is a single one."""
    if _span(box, strides) <= most or box.volume <= 1:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.sizes) if size > 1)
    row = _span(Box(box.offsets, (*box.sizes[:axis], 1, *box.sizes[axis + 1 :])), strides)
    rows = max(1, (most - row) // strides[axis] + 1) if row <= most else 1
    for start in range(0, box.sizes[axis], rows):
        size = min(rows, box.sizes[axis] - start)
        part = Box(
            (*box.offsets[:axis], box.offsets[axis] + start, *box.offsets[axis + 1 :]),
            (*box.sizes[:axis], size, *box.sizes[axis + 1 :]),
        )
        yield from _slabs(part, strides, most)


def _span(box: Box, strides: tuple[int, ...]) -> int:
    """Elements from the box's first to its last, both included, in an array of these strides."""
    if any(size == 0 for size in box.sizes):
        return 0
    return sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True)) + 1


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
