"""What divisions of a tensor's dimensions leave a rank: runs of indices, and the boxes made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._state.geometry import Box

Runs = tuple[tuple[int, int], ...]
"""Ascending, separate runs of indices of one axis, each as (start, length); lengths are positive."""


def boxes_from_runs(runs: Sequence[Sequence[tuple[int, int]]]) -> list[Box]:
    """The boxes that hold every combination of one run per dimension, last dimension fastest.

    >>> boxes_from_runs([[(0, 2), (4, 1)], [(3, 5)]])
    [Box(offsets=(0, 3), sizes=(2, 5)), Box(offsets=(4, 3), sizes=(1, 5))]
    >>> boxes_from_runs([])
    [Box(offsets=(), sizes=())]
    """
    return [Box(tuple(s for s, _ in pick), tuple(n for _, n in pick)) for pick in itertools.product(*runs)]


def split_flat_interval(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Elements `[start, stop)` of a row-major array of `shape` as boxes, each with the position of its first element.

    The boxes come in order and are runs of the array; there are at most 2k-1 of them for k dimensions (k >= 1): the
    rest of a row, whole rows, the beginning of a row, at each level. Raises `InvalidArgumentError` for an interval that
    leaves the array.

    >>> for box, at in split_flat_interval((3, 4), 2, 9): print(at, box.offsets, box.sizes)
    2 (0, 2) (1, 2)
    4 (1, 0) (1, 4)
    8 (2, 0) (1, 1)
    >>> split_flat_interval((), 0, 1)
    [(Box(offsets=(), sizes=()), 0)]
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise InvalidArgumentError(
            f"Elements [{start}, {stop}) are not inside an array of shape {tuple(shape)}, "
            f"which has {math.prod(shape)} elements."
        )
    boxes: list[tuple[Box, int]] = []
    _split_below(tuple(shape), (), start, stop, 0, boxes)
    return boxes


def _split_below(
    shape: tuple[int, ...], prefix: tuple[int, ...], start: int, stop: int, base: int, out: list[tuple[Box, int]]
) -> None:
    """Append the boxes of `[start, stop)` of the sub-array at index `prefix`, which begins at element `base`."""
    if start >= stop:
        return
    ones = (1,) * len(prefix)
    if not shape:
        out.append((Box(prefix, ones), base))
        return
    row, rest = math.prod(shape[1:]), shape[1:]

    def part_of_row(index: int, begin: int, end: int) -> None:
        _split_below(rest, (*prefix, index), begin - index * row, end - index * row, base + index * row, out)

    first, last = start // row, stop // row
    if start % row:
        part_of_row(first, start, min(stop, (first + 1) * row))
        first += 1
    if first < last:
        box = Box((*prefix, first, *(0 for _ in rest)), (*ones, last - first, *rest))
        out.append((box, base + first * row))
    if stop % row and first <= last:
        part_of_row(last, last * row, stop)


@dataclass(frozen=True, slots=True)
class Split:
    """One division of an axis among the ranks of a mesh dimension."""

    dim: int
    parts: int
    """Among how many ranks."""
    index: int
    """Which of them is meant."""
    pieces: int = 1
    """The axis is cut into so many pieces first and each piece is divided; more than 1 leaves rows apart."""


def owned_runs(shape: Sequence[int], splits: Sequence[Split]) -> tuple[Runs, ...]:
    """What is left of each dimension of `shape` after `splits`, one after the other, each dividing what is left.

    A division into n gives everyone `ceil(size / n)` in order until nothing is left, so the last ones may get less or
    nothing. Runs that touch are joined.

    >>> owned_runs((6, 3), [Split(dim=0, parts=4, index=2)])
    (((4, 2),), ((0, 3),))
    >>> owned_runs((8,), [Split(dim=0, parts=2, index=0, pieces=2)])
    (((0, 2), (4, 2)),)
    >>> owned_runs((6,), [Split(dim=0, parts=4, index=3)])
    ((),)
    """
    owned: list[Runs] = [((0, size),) if size else () for size in shape]
    for split in splits:
        owned[split.dim] = _divide(owned[split.dim], split)
    return tuple(owned)


def _divide(runs: Runs, split: Split) -> Runs:
    total = sum(length for _, length in runs)
    piece = -(-total // split.pieces)
    kept: list[tuple[int, int]] = []
    for begin in range(0, total, piece or 1):
        size = min(piece, total - begin)
        share = -(-size // split.parts)
        start = begin + min(size, split.index * share)
        stop = begin + min(size, (split.index + 1) * share)
        _append_positions(kept, runs, start, stop)
    return tuple(kept)


def _append_positions(kept: list[tuple[int, int]], runs: Runs, start: int, stop: int) -> None:
    """Append what lies at positions `[start, stop)` of the cells of `runs`, counted over all runs."""
    passed = 0
    for run, length in runs:
        a, b = max(start - passed, 0), min(stop - passed, length)
        passed += length
        if a >= b:
            continue
        if kept and sum(kept[-1]) == run + a:
            kept[-1] = (kept[-1][0], kept[-1][1] + b - a)
        else:
            kept.append((run + a, b - a))
