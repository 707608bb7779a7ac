"""Whether what ranks hold together is each element of each tensor, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from hpdcp._base.errors import StateDictError
from hpdcp._format.columns import I64, ChunkTable, EntryKind, EntryTable, starts_of
from hpdcp._state.box_index import BoxIndex
from hpdcp._state.coverage import missing
from hpdcp._state.geometry import Box
from hpdcp._state.mismatches import listed

_MOST_NAMED: Final = 20
_MEASURED_AXES: Final = 16
"""Up to so many axes a measure proves what it is asked to; tensors with more are looked at one by one."""


def check_exact_cover(entries: EntryTable, chunks: ChunkTable) -> None:
    """Raise unless the distinct boxes of each tensor hold every element of it once.

    A hole could never be loaded again. Of elements in two boxes one box's values would be lost, without a word.

    Args:
        entries: what the chunks are of.
        chunks: each box once, sorted by entry.

    Raises:
        StateDictError: names the tensors; for each, a box that nobody holds, or two that overlap.
    """
    holes: list[str] = []
    shared: list[str] = []
    for row, boxes in _not_covered_once(entries, chunks):
        shape = entries.shape(row)
        hole = missing(Box((0,) * len(shape), shape), boxes)
        if hole is not None:
            holes.append(f"{entries.fqns[row]!r} of shape {list(shape)} lacks {_spelled(hole)}")
        elif (pair := _overlapping(boxes)) is not None:
            shared.append(_sharing(entries, row, pair))
    if holes:
        raise StateDictError(
            f"no rank holds all of {len(holes)} tensors: {listed(holes, most=_MOST_NAMED, separator='; ')}. "
            "Every rank of a tensor's mesh must save, with its shard."
        )
    if shared:
        raise _overlap_error(shared)


def overlapping_boxes(entries: EntryTable, chunks: ChunkTable) -> list[str]:
    """Tensors of which distinct boxes overlap, each with two of them, as text; arguments as `check_exact_cover`."""
    return [
        _sharing(entries, row, pair)
        for row, boxes in _not_covered_once(entries, chunks)
        if (pair := _overlapping(boxes)) is not None
    ]


def _sharing(entries: EntryTable, row: int, pair: tuple[Box, Box]) -> str:
    return f"{entries.fqns[row]!r} of shape {list(entries.shape(row))}: {_spelled(pair[0])} and {_spelled(pair[1])}"


def _overlap_error(shared: list[str]) -> StateDictError:
    return StateDictError(
        f"{len(shared)} tensors have elements that belong to two different shards, of which only one's values could "
        f"be stored: {listed(shared, most=_MOST_NAMED, separator='; ')}. Correct the offsets and sizes that describe "
        "the shards; a shard that several ranks hold must be the same box on each of them."
    )


def _not_covered_once(entries: EntryTable, chunks: ChunkTable) -> Iterator[tuple[int, list[Box]]]:
    """Rows of tensors whose boxes do not hold every element once, with the boxes."""
    # Boxes that overlap may have the right volume and leave a hole, so coordinates are measured by numbers at random:
    # then only boxes that cover everything once add up, and the few tensors that do not are looked at one by one.
    axes = _axes(chunks.ends)
    lengths = _random_of(axes, chunks.offsets + chunks.sizes) - _random_of(axes, chunks.offsets)
    covered = np.zeros(len(entries), dtype=np.int64)
    np.add.at(covered, chunks.entry, replace(chunks, sizes=lengths).volumes())
    axes = _axes(entries.shape_ends)
    spans = _random_of(axes, entries.shape_dims) - _random_of(axes, np.zeros_like(entries.shape_dims))
    doubtful = covered != replace(entries, shape_dims=spans).volumes()
    # A random number is even every other time, so a product of many of them keeps few of its 64 bits.
    doubtful |= (entries.shape_ends - starts_of(entries.shape_ends) > _MEASURED_AXES) & (entries.volumes() > 0)
    doubtful &= entries.kinds == EntryKind.TENSOR
    for row in np.flatnonzero(doubtful).tolist():
        first, last = np.searchsorted(chunks.entry, [row, row + 1]).tolist()
        yield row, [Box(*chunks.box(i)) for i in range(first, last)]


def _overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that share an element."""
    if len(boxes) < 2:
        return None
    index = BoxIndex(np.array([box.offsets for box in boxes]), np.array([box.sizes for box in boxes]))
    for box in boxes:
        for number in index.overlapping(box).tolist():
            if boxes[number] != box:
                return box, boxes[number]
    return None


def _spelled(box: Box) -> str:
    return f"{list(box.offsets)} to {list(box.stops)}"


def _axes(ends: I64) -> I64:
    """Which axis each coordinate of these runs belongs to."""
    starts = starts_of(ends)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) - np.repeat(starts, ends - starts)


def _random_of(axes: I64, coordinates: I64) -> I64:
    """A number for each (axis, coordinate), always the same one, that looks drawn at random (splitmix64)."""
    x = coordinates.astype(np.uint64) + axes.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: I64 = (x ^ (x >> np.uint64(31))).view(np.int64)
    return mixed
