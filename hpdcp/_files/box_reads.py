"""Boxes to read, as ranges of files: which bytes are read, where they go, and what is read together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from hpdcp._base.backend import ByteRange
from hpdcp._devices import device
from hpdcp._format.metadata import StorageInfo
from hpdcp._state.geometry import Box, flat_start, is_contiguous, relative, row_runs
from hpdcp._state.views import view_of_box

SLAB_BYTES = 32 << 20
"""Most host memory that a window takes which passes through memory of the engine's own; a multiple of `BLOCK_BYTES`."""
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


Copy: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]
"""Fills a target, its first argument, with a source of the same shape."""


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """A range of a file to ask for, and what is done with it."""

    read: BoxRead
    range: ByteRange
    into: memoryview | None
    """The target's own memory; None where the bytes take a detour."""
    deliver: Callable[[torch.Tensor, Copy], None] | None = None
    """Puts the bytes, as a flat tensor of the stored dtype, where it belongs."""


def range_requests(read: BoxRead, *, cut: bool) -> Iterator[RangeRequest]:
    """What to read for one box, in the order of the file; with `cut`, none of it longer than `SLAB_BYTES`."""
    target = read.target
    plain = target.is_contiguous() and target.dtype == read.dtype and not (target.is_conj() or target.is_neg())
    memory = device.host_bytes(target) if plain and device.is_host(target) else None
    if is_contiguous(read.box, read.sizes):
        if memory is not None:
            for range_, start in _cuts(read) if cut else [_one_range(read)]:
                yield RangeRequest(read, range_, memory[start : start + range_.length])
            return
        if target.is_contiguous():
            flat = target.detach().view(-1)
            for range_, start in _cuts(read):
                part = flat.narrow(0, start // read.dtype.itemsize, range_.length // read.dtype.itemsize)
                yield RangeRequest(read, range_, None, partial(_take_whole, part))
            return
    elif memory is not None:
        starts, elements = row_runs(read.box, read.sizes)
        run = elements * read.dtype.itemsize
        if run >= _LONG_RUN_BYTES:
            for i, first in enumerate(starts.tolist()):
                range_ = ByteRange(read.stored.offset + first * read.dtype.itemsize, run)
                yield RangeRequest(read, range_, memory[i * run : (i + 1) * run])
            return
    yield from _slab_requests(read)


def windows_of(requests: Iterable[RangeRequest], *, bounded: bool) -> Iterator[list[RangeRequest]]:
    """Requests for one file, to be read together: at most `SLAB_BYTES` of detours, or of anything if `bounded`."""
    window: list[RangeRequest] = []
    held = 0
    for request in requests:
        counted = request.range.length if bounded or request.into is None else 0
        if window and (held + counted > SLAB_BYTES or request.read.stored.key != window[0].read.stored.key):
            yield window
            window, held = [], 0
        window.append(request)
        held += counted
    if window:
        yield window


def _one_range(read: BoxRead) -> tuple[ByteRange, int]:
    """The one run that a contiguous box is, and 0, where it begins in the target."""
    itemsize = read.dtype.itemsize
    start = read.stored.offset + flat_start(read.box, read.sizes) * itemsize
    return ByteRange(start, read.box.volume * itemsize), 0


def _cuts(read: BoxRead) -> Iterator[tuple[ByteRange, int]]:
    """The run of a contiguous box in ranges of at most `SLAB_BYTES`, and where each begins in the target.

    Cut where blocks end, so that every block of the run is in one range and can be checked.
    """
    whole, _ = _one_range(read)
    most = max(SLAB_BYTES // read.dtype.itemsize, 1) * read.dtype.itemsize
    begin = whole.offset - read.stored.offset
    position = begin
    while position < begin + whole.length:
        stop = min((position // most + 1) * most, begin + whole.length)
        yield ByteRange(read.stored.offset + position, stop - position), position - begin
        position = stop


def _slab_requests(read: BoxRead) -> Iterator[RangeRequest]:
    """Slab by slab, each the span from its first element to its last."""
    itemsize = read.dtype.itemsize
    strides = _row_major(read.sizes)
    for slab in _slabs(read.box, strides, max(1, SLAB_BYTES // itemsize)):
        elements = _span(slab, strides)
        if elements:
            start = read.stored.offset + flat_start(slab, read.sizes) * itemsize
            yield RangeRequest(
                read, ByteRange(start, elements * itemsize), None, partial(_take_slab, read, slab, strides)
            )


def _take_whole(target: torch.Tensor, elements: torch.Tensor, copy: Copy) -> None:
    copy(target, elements)


def _take_slab(read: BoxRead, slab: Box, strides: tuple[int, ...], elements: torch.Tensor, copy: Copy) -> None:
    """Copy what is wanted of a slab's span to where it belongs in the target."""
    target = view_of_box(read.target, relative(slab, read.box).offsets, slab.sizes)
    copy(target, elements.as_strided(slab.sizes, strides))


def _slabs(box: Box, strides: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes that make up `box`, in order, none of which spans more than `most` elements unless it is a single one."""
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
