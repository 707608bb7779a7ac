"""What a checkpoint holds, as a load looks things up in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpdcp._format.columns import I64, EntryKind
from hpdcp._format.metadata import Metadata
from hpdcp._state.box_index import BoxIndex
from hpdcp._state.dtypes import itemsize_of
from hpdcp._state.geometry import Box, intersect
from hpdcp._state.paths import Keys, Path, decode_path, fqn_of


class StoredIndex:
    """Finds entries, and the stored chunks that overlap a box."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._boxes_of: dict[int, _StoredBoxes] = {}

    def find(self, fqn: str, owner: int | None) -> int | None:
        """Row of the entry; state that every rank keeps for itself is found by its owner only."""
        return self._metadata.find(fqn, owner)

    def enclosing_value(self, path: Path, owner: int | None) -> tuple[int, Keys] | None:
        """The row of a Python value that was stored whole and should have `path` inside it, and where; None: there is
        none. One stored at `path` itself counts."""
        for depth in range(len(path), 0, -1):
            row = self.find(fqn_of(path[:depth]), owner)
            if row is not None and self._metadata.entries.kinds[row] == EntryKind.OBJECT:
                return row, tuple(path[depth:])
        return None

    def equal_by_checksums(self, row: int, other: int) -> bool | None:
        """Whether two stored tensors are equal; None where only reading them tells."""
        table, chunks = self._metadata.storage, self._metadata.chunks
        mine, theirs = self._metadata.chunk_rows(row), self._metadata.chunk_rows(other)
        if self._metadata.entries.dtype(row) != self._metadata.entries.dtype(other):
            return None
        if not self._metadata.has_checksums or len(mine) != len(theirs):
            return None
        if any(chunks.box(a) != chunks.box(b) for a, b in zip(mine, theirs, strict=True)):
            return None
        a, b = slice(mine.start, mine.stop), slice(theirs.start, theirs.stop)
        if not np.array_equal(table.length[a], table.length[b]):
            return None
        if np.array_equal(table.crcs[_run(table.crc_ends, mine)], table.crcs[_run(table.crc_ends, theirs)]):
            return True
        # What was compressed, or padded, may differ and mean the same.
        itemsize = itemsize_of(self._metadata.entries.dtype(row))
        plain = all(int(table.length[at]) == Box(*chunks.box(at)).volume * itemsize for at in mine)
        return False if plain else None

    def overlaps(self, row: int, want: Box) -> Iterator[tuple[int, Box, Box]]:
        """(row of a stored chunk, its box, what of `want` it covers), identical boxes once."""
        rows = self._metadata.chunk_rows(row)
        if len(rows) == 1:
            have = Box(*self._metadata.chunks.box(rows[0]))
            part = want if have == want else intersect(want, have)
            if part is not None:
                yield rows[0], have, part
            return
        boxes = self._boxes(self._metadata.resolve(row), rows)
        seen: set[Box] = set()
        for number in boxes.meeting(want).tolist():
            have = boxes.box(number)
            part = intersect(want, have)
            if part is None or have in seen:
                continue
            seen.add(have)
            yield rows[number], have, part

    def _boxes(self, row: int, rows: range) -> _StoredBoxes:
        if row not in self._boxes_of:
            chunks = self._metadata.chunks
            ndim = len(self._metadata.entries.shape(row))
            first = int(chunks.ends[rows[0] - 1]) if len(rows) and rows[0] else 0
            last = int(chunks.ends[rows[-1]]) if len(rows) else 0
            self._boxes_of[row] = _StoredBoxes(
                chunks.offsets[first:last].reshape(len(rows), ndim), chunks.sizes[first:last].reshape(len(rows), ndim)
            )
        return self._boxes_of[row]

    def owned_at_or_below(self, path: Path) -> list[int]:
        """Rows of state that ranks keep for themselves, at `path` or inside it."""
        entries = self._metadata.entries
        owned = np.flatnonzero(entries.owners >= 0).tolist()
        return [row for row in owned if decode_path(entries.paths[row])[: len(path)] == tuple(path)]


def _run(ends: I64, rows: range) -> slice:
    """Where the values of consecutive rows lie."""
    return slice(int(ends[rows.start - 1]) if rows.start else 0, int(ends[rows.stop - 1]) if rows else 0)


class _StoredBoxes:
    """The stored boxes of one tensor, sorted by offsets, as metadata has them.

    A rank asks for one box or a few of each tensor. Where the boxes follow one another along one dimension, as they
    mostly do, two binary searches find what meets it; building an index of thousands of boxes would cost far more.
    """

    def __init__(self, offsets: I64, sizes: I64) -> None:
        self._offsets = offsets
        self._sizes = sizes
        self._index: BoxIndex | None = None
        self._axis: int | None = None
        differ = np.flatnonzero((offsets != offsets[:1]).any(axis=0))
        if len(differ) == 1:
            self._ends = offsets[:, differ[0]] + sizes[:, differ[0]]
            if bool((self._ends[1:] >= self._ends[:-1]).all()):
                self._axis = int(differ[0])

    def box(self, number: int) -> Box:
        return Box(tuple(self._offsets[number].tolist()), tuple(self._sizes[number].tolist()))

    def meeting(self, want: Box) -> I64:
        """Numbers of the boxes that meet `want`, ascending; of one that equals it that one alone."""
        near = self._near(want)
        offsets, sizes = self._offsets[near], self._sizes[near]
        equal = np.flatnonzero(((offsets == want.offsets) & (sizes == want.sizes)).all(axis=1))
        return near[equal[:1]] if len(equal) else near

    def _near(self, want: Box) -> I64:
        if self._axis is None:
            if self._index is None:
                self._index = BoxIndex(self._offsets, self._sizes)
            return self._index.overlapping(want)
        first = np.searchsorted(self._ends, want.offsets[self._axis], side="right")
        stop = np.searchsorted(self._offsets[:, self._axis], want.stops[self._axis], side="left")
        return np.arange(first, stop)
