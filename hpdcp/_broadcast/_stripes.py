"""Shared chunks cut into boxes, so that no rank reads all of a large one for the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from hpdcp._format.columns import I64, ChunkTable, ends_of

STRIPE_BYTES: Final = 64 << 20
"""A shared chunk larger than this is cut by rows into boxes of at most this size, each with its own reader rank."""

_OffsetsAndSizes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stripes:
    """The boxes that shared chunks are sent in, chunk by chunk: one, or several where the chunk is large."""

    boxes: ChunkTable
    """Relative to their chunk."""
    chunk: I64
    """Which chunk each is a box of."""
    nbytes: I64

    @classmethod
    def of_chunks(cls, chunks: ChunkTable, widths: I64, members: I64) -> Stripes:
        """The boxes of `chunks`, of elements of these widths in bytes, each wanted by so many members."""
        nbytes = chunks.volumes() * widths
        cut: dict[int, list[_OffsetsAndSizes]] = {}
        counts = np.ones(len(chunks), dtype=np.int64)
        for row in np.flatnonzero(nbytes > STRIPE_BYTES).tolist():
            total = int(nbytes[row])
            count = balanced_count(total, STRIPE_BYTES, STRIPE_BYTES // 8, int(members[row]))
            cut[row] = _cut(chunks.box(row)[1], int(widths[row]), -(-total // count))
            counts[row] = len(cut[row])
        chunk = np.repeat(np.arange(len(chunks), dtype=np.int64), counts)
        boxes = chunks.take(chunk)
        boxes.offsets[:] = 0
        ends = ends_of(counts)
        for row, stripes in cut.items():
            for stripe, (offsets, sizes) in enumerate(stripes, int(ends[row]) - len(stripes)):
                dims = slice(int(boxes.ends[stripe]) - len(sizes), int(boxes.ends[stripe]))
                boxes.offsets[dims], boxes.sizes[dims] = offsets, sizes
        return cls(boxes, chunk, boxes.volumes() * widths[chunk])


def balanced_count(total: int, most: int, least: int, members: int) -> int:
    """In how many to divide `total` bytes among `members` ranks.

    So many that none is larger than `most`; and a multiple of `members`, as far as that leaves each of them `least`.
    """
    count = -(-total // max(most, 1))
    return max(count, min(-(-count // members) * members, total // max(least, 1)), 1)


def _cut(sizes: tuple[int, ...], width: int, most: int) -> list[_OffsetsAndSizes]:
    """Boxes of about equal size, at most `most` bytes unless they are single elements; each one run of elements."""
    total = math.prod(sizes) * width
    if total <= most or total <= width:
        return [((0,) * len(sizes), sizes)]
    rows, rest = sizes[0], sizes[1:]
    at_once = most * rows // total
    if at_once:
        at_once = -(-rows // -(-rows // at_once))
        nowhere = (0,) * len(rest)
        return [((start, *nowhere), (min(at_once, rows - start), *rest)) for start in range(0, rows, at_once)]
    inner = _cut(rest, width, most)
    return [((row, *offsets), (1, *part)) for row in range(rows) for offsets, part in inner]
