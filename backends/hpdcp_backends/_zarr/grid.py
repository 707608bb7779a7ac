"""Which regular chunks a tensor gets, given the boxes that ranks hold of it. Integers only.

zarr, version 3, has one regular grid for an array. The best one is made of the ranks' own boxes, so that every chunk is
held by one rank. Where the boxes are too small, or their edges have nothing in common, chunks are larger than that, and
ranks send their boxes of a chunk to the one that writes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hpdcp._state.geometry import Box, intersect

SMALL_BYTES: Final = 1 << 20
"""No tensor is cut into chunks that are smaller: a thousand small tensors are a thousand objects, not one for each rank
as well."""
LARGE_BYTES: Final = 256 << 20
"""Chunks are cut above this where that is possible: a reader of zarr holds a chunk in memory, and its compressors take
less than 2 GiB."""


def chunk_shape(
    shape: tuple[int, ...], itemsize: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[int, ...]:
    """The grid's step along each dimension, between 1 and the tensor's size there.

    `offsets` and `sizes` are those of the boxes that ranks hold, row by row.

    >>> rows = np.array([[0, 0], [2, 0], [4, 0]]) * 300_000
    >>> chunk_shape((1_500_000, 1), 4, rows, np.array([[600_000, 1], [600_000, 1], [300_000, 1]]))
    (600000, 1)
    """
    whole = tuple(max(1, size) for size in shape)
    if math.prod(shape) * itemsize <= SMALL_BYTES or not len(offsets):
        return whole
    steps = [_step(size, offsets[:, axis], sizes[:, axis]) for axis, size in enumerate(shape)]
    if math.prod(step for _, step in steps) * itemsize >= SMALL_BYTES:
        found = [step for _, step in steps]
    else:
        # Edges that have too little in common, or small boxes.
        found = [typical for typical, _ in steps]
        _coarsen(found, shape, itemsize)
    _refine(found, shape, itemsize)
    return tuple(found)


def _step(size: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[int, int]:
    """A step about as long as the boxes are, and the longest one that every edge falls on."""
    edges = np.unique(np.concatenate((offsets, offsets + sizes)))
    inside = edges[(edges > 0) & (edges < size)]
    if not len(inside):
        return size, size
    return -(-size // (len(inside) + 1)), int(np.gcd.reduce(inside))


def _coarsen(steps: list[int], shape: tuple[int, ...], itemsize: int) -> None:
    """Lengthen steps, last dimension first, until a chunk is no longer small."""
    for axis in range(len(steps) - 1, -1, -1):
        nbytes = math.prod(steps) * itemsize
        if nbytes >= SMALL_BYTES:
            return
        steps[axis] = min(shape[axis], steps[axis] * -(-SMALL_BYTES // nbytes))


def _refine(steps: list[int], shape: tuple[int, ...], itemsize: int) -> None:
    """Shorten the step of the first dimension that allows it, so that no chunk is larger than it should be."""
    for axis, step in enumerate(steps):
        wanted = -(-math.prod(steps) * itemsize // LARGE_BYTES)
        if wanted <= 1:
            return
        if step == shape[axis]:
            # No edges of boxes inside: any step will do.
            steps[axis] = -(-step // min(wanted, step))
        else:
            divisors = (number for number in range(wanted, min(4 * wanted, step) + 1) if step % number == 0)
            steps[axis] = step // next(divisors, 1)


@dataclass(frozen=True, slots=True)
class Cell:
    """One chunk of the grid, and who has it."""

    box: Box
    """Inside the tensor: clipped at its end."""
    holder: int
    """The box (row) that holds all of it; -1 where it is put together."""
    held: tuple[tuple[int, Box], ...] = ()
    """(row, the box it holds of the chunk), where it is put together."""


def _cell_box(at: tuple[int, ...], steps: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    begin = tuple(a * n for a, n in zip(at, steps, strict=True))
    return Box(begin, tuple(min(n, s - a) for a, n, s in zip(begin, steps, shape, strict=True)))


def cells(
    shape: tuple[int, ...], steps: tuple[int, ...], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> Iterator[Cell]:
    """The chunks of a grid, in row-major order; each has the first box that holds all of it, or all that hold some."""
    counts = [-(-size // step) for size, step in zip(shape, steps, strict=True)]
    boxes = [Box(tuple(begin), tuple(size)) for begin, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    whole = Box.whole(shape)
    if math.prod(counts) == 1:
        # As most tensors are: small, or held by one rank.
        row = next((row for row, box in enumerate(boxes) if box == whole), -1)
        yield Cell(whole, row, tuple(enumerate(boxes)) if row < 0 else ())
        return
    held: dict[tuple[int, ...], int] = {}
    touched: dict[tuple[int, ...], list[int]] = {}
    step = np.array(steps, dtype=np.int64)
    end = np.array(shape, dtype=np.int64)
    stops = offsets + sizes
    last = -(-stops // step)
    bounds = (-(-offsets // step), np.where(stops == end, last, stops // step), offsets // step, last)
    for row, (whole_first, whole_last, first, past) in enumerate(
        zip(*(bound.tolist() for bound in bounds), strict=True)
    ):
        inner = [range(a, b) for a, b in zip(whole_first, whole_last, strict=True)]
        for at in itertools.product(*inner):
            held.setdefault(at, row)
        outer = [range(a, b) for a, b in zip(first, past, strict=True)]
        if inner != outer:
            for at in itertools.product(*outer):
                if at not in held:
                    touched.setdefault(at, []).append(row)
    for at in itertools.product(*map(range, counts)):
        box = _cell_box(at, steps, shape)
        if at in held:
            yield Cell(box, held[at])
            continue
        found = ((row, intersect(box, boxes[row])) for row in touched.get(at, ()))
        yield Cell(box, -1, tuple((row, common) for row, common in found if common is not None))
