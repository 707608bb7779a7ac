"""Whether what ranks hold together is all of each tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from hpdcp._base.errors import StateDictError
from hpdcp._format.columns import I64, ChunkTable, EntryKind, EntryTable, starts_of
from hpdcp._state.coverage import missing
from hpdcp._state.geometry import Box
from hpdcp._state.mismatches import listed

_MOST_NAMED: Final = 20


def check_no_holes(entries: EntryTable, chunks: ChunkTable) -> None:
    """Raise unless the distinct boxes of each tensor cover all of it: a hole could never be loaded again.

    Raises:
        StateDictError: names the tensors, and for each a box that nobody holds.
    """
    # Boxes that overlap may have the right volume and leave a hole, so coordinates are measured by numbers at random:
    # then only boxes that cover everything once add up, and the few tensors that do not are looked at one by one.
    axes = _axes(chunks.ends)
    lengths = _random_of(axes, chunks.offsets + chunks.sizes) - _random_of(axes, chunks.offsets)
    covered = np.zeros(len(entries), dtype=np.int64)
    np.add.at(covered, chunks.entry, replace(chunks, sizes=lengths).volumes())
    axes = _axes(entries.shape_ends)
    spans = _random_of(axes, entries.shape_dims) - _random_of(axes, np.zeros_like(entries.shape_dims))
    tensors = entries.kinds == EntryKind.TENSOR
    doubtful = np.flatnonzero(tensors & (covered != replace(entries, shape_dims=spans).volumes()))
    holes: list[str] = []
    for row in doubtful.tolist():
        first, last = np.searchsorted(chunks.entry, [row, row + 1]).tolist()
        shape = entries.shape(row)
        hole = missing(Box((0,) * len(shape), shape), [Box(*chunks.box(i)) for i in range(first, last)])
        if hole is not None:
            stop = tuple(a + b for a, b in zip(hole.offsets, hole.sizes, strict=True))
            holes.append(f"{entries.fqns[row]!r} of shape {list(shape)} lacks {list(hole.offsets)} to {list(stop)}")
    if holes:
        raise StateDictError(
            f"no rank holds all of {len(holes)} tensors: {listed(holes, most=_MOST_NAMED, separator='; ')}. "
            "Every rank of a tensor's mesh must save, with its shard."
        )


def _axes(ends: I64) -> I64:
    """Which axis each coordinate of these runs belongs to."""
    starts = starts_of(ends)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) - np.repeat(starts, ends - starts)


def _random_of(axes: I64, coordinates: I64) -> I64:
    """A number for each (axis, coordinate), always the same one, that looks drawn at random (splitmix64)."""
    x = coordinates.astype(np.uint64) * np.uint64(64) + axes.astype(np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)
