"""The names a checkpoint holds: which lie below one, and which are meant by one that is not there."""

from __future__ import annotations

import bisect
import difflib
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from hpdcp._format.metadata import Metadata
from hpdcp._state.paths import decode_path, path_below

_MOST_HINTED: Final = 20
"""Names that near ones are looked up for: each costs milliseconds, and thousands may be missing."""
_MOST_COMPARED: Final = 300


class StoredNames:
    """The names on record, in order."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._names: list[str] | None = None
        self._hinted = 0

    def below(self, fqn: str) -> list[str]:
        """A few stored names inside `fqn`."""
        return list(itertools.islice(self._beginning_with(f"{fqn}."), 3))

    def all_below(self, fqn: str) -> Iterator[str]:
        """Every stored name inside `fqn`."""
        return self._beginning_with(f"{fqn}.")

    def items_from(self, fqn: str, start: int) -> int:
        """How many items are stored of the sequence called `fqn`; `start` where there are none from there on."""
        count = start
        while (name := self._item_name(fqn, count)) is not None:
            row = self._metadata.rows_of(name)[0]
            tail = path_below(decode_path(self._metadata.entries.paths[row]), fqn)
            if tail is None or tail.kinds[0] in ("dict", "OrderedDict"):
                break
            count += 1
        return count

    def _item_name(self, fqn: str, index: int) -> str | None:
        """A stored name at an index of `fqn`, or inside of it."""
        name = f"{fqn}.{index}"
        if self._metadata.rows_of(name):
            return name
        return next(self._beginning_with(f"{name}."), None)

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
