"""What a checkpoint holds, as a load looks things up in it."""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from hpdcp._format.columns import I64
from hpdcp._format.metadata import Metadata
from hpdcp._state.box_index import BoxIndex
from hpdcp._state.geometry import Box, intersect
from hpdcp._state.paths import Path, decode_path

_MOST_HINTED: Final = 20
"""Names that near ones are looked up for: each costs milliseconds, and thousands may be missing."""
_MOST_COMPARED: Final = 300


class Stored:
    """What the checkpoint holds, as a load looks things up in it."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._boxes_of: dict[int, _StoredBoxes] = {}
        self._names: list[str] | None = None
        self._hinted = 0

    def find(self, fqn: str, owner: int | None) -> int | None:
        """Row of the entry; state that every rank keeps for itself is found by its owner only."""
        return self._metadata.find(fqn, owner)

    def pieces(self, row: int, want: Box) -> Iterator[tuple[int, Box, Box]]:
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

    def below(self, fqn: str) -> list[str]:
        """A few stored names inside `fqn`."""
        return list(itertools.islice(self._beginning_with(f"{fqn}."), 3))

    def owned_at_or_below(self, path: Path) -> list[int]:
        """Rows of state that ranks keep for themselves, at `path` or inside it."""
        entries = self._metadata.entries
        owned = np.flatnonzero(entries.owners >= 0).tolist()
        return [row for row in owned if decode_path(entries.paths[row])[: len(path)] == tuple(path)]

    def hint(self, fqn: str) -> str:
        """The name, with those stored that look most like it; the name alone once many have been asked for."""
        self._hinted += 1
        if self._hinted > _MOST_HINTED:
            return repr(fqn)
        near = difflib.get_close_matches(fqn, self._lookalikes(fqn), n=2, cutoff=0.6)
        return f"{fqn!r}" + (f" (did you mean {' or '.join(map(repr, near))}?)" if near else "")

    def prefix_hint(self, fqns: Sequence[str]) -> str:
        """A sentence on the one prefix by which most of these names differ from stored ones; empty: there is none."""
        names = set(self._all_names()) if len(fqns) > 1 else set()
        best, said = 0, ""
        for prefix in dict.fromkeys(self._prefixes_near(fqns)) if names else ():
            without = sum(fqn.startswith(prefix) and fqn.removeprefix(prefix) in names for fqn in fqns)
            added = sum(prefix + fqn in names for fqn in fqns)
            for count, how in ((without, "without"), (added, "with")):
                if count > best:
                    best, said = count, f"{count} of the {len(fqns)} are stored {how} {prefix!r} in front."
        return said if 2 * best > len(fqns) else ""

    def _prefixes_near(self, fqns: Sequence[str]) -> Iterator[str]:
        """What stands before other components in a few of the names, and before a few of them in stored names."""
        for fqn in {fqns[0], fqns[len(fqns) // 2], fqns[-1]}:
            yield from (fqn[: place + 1] for place, char in enumerate(fqn) if char == ".")
            longer = (name for name in self._all_names() if name.endswith(f".{fqn}"))
            yield from (name.removesuffix(fqn) for name in itertools.islice(longer, 3))

    def _lookalikes(self, fqn: str) -> list[str]:
        """Stored names that end as `fqn` does, or begin so, in as many components as any do."""
        parts = fqn.split(".")
        found: list[str] = []
        for count in range(len(parts), 0, -1):
            tail = ".".join(parts[-count:])
            ends = (name for name in self._all_names() if name == tail or name.endswith(f".{tail}"))
            found = list(itertools.islice(ends, _MOST_COMPARED))
            if found:
                break
        for count in range(len(parts) - 1, 0, -1):
            begins = list(itertools.islice(self._beginning_with(".".join(parts[:count]) + "."), _MOST_COMPARED))
            if begins:
                return found + begins
        return found or self._all_names()[:_MOST_COMPARED]

    def _beginning_with(self, prefix: str) -> Iterator[str]:
        names = self._all_names()
        for position in range(bisect.bisect_left(names, prefix), len(names)):
            if not names[position].startswith(prefix):
                return
            yield names[position]

    def _all_names(self) -> list[str]:
        if self._names is None:
            # Sorted: UTF-8 and Python order strings alike.
            self._names = list(self._metadata.state_dict_metadata)
        return self._names


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
