"""The names a checkpoint holds: which lie below one, and which are meant by one that is not there."""

from __future__ import annotations

import bisect
import difflib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from hpdcp._format.metadata import Metadata
from hpdcp._state.paths import decode_path, path_below

_MOST_HINTED: Final = 20
"""Names that near ones are looked up for: each costs milliseconds, and thousands may be missing."""
_MOST_COMPARED: Final = 300


_WRAPPERS: Final = ("_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What torch.compile, DDP, activation checkpointing and FSDP put into the names of what they wrap."""


@dataclass(frozen=True, slots=True)
class Cause:
    """What missing names and stored ones differ by."""

    how: str
    """How they are stored: "without 'model.' in front"."""
    stored: Mapping[str, str]
    """Of those that it explains, the name under which each is stored."""


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
        near = difflib.get_close_matches(fqn, dict.fromkeys(self._lookalikes(fqn)), n=2, cutoff=0.6)
        return f"{fqn!r}" + (f" (did you mean {' or '.join(map(repr, near))}?)" if near else "")

    def cause(self, missing: Sequence[str]) -> Cause | None:
        """What most of the missing names and the stored ones differ by; None where there is no such thing."""
        if len(missing) < 2:
            return None
        names = set(self._all_names())
        best: Cause | None = None
        for how, renamed in self._renamings(missing, names):
            stored = {fqn: name for fqn in missing if (name := renamed(fqn)) is not None}
            if 2 * len(stored) > max(len(missing), 2 * len(best.stored) if best else 0):
                best = Cause(how, stored)
        return best

    def _renamings(self, missing: Sequence[str], names: Set[str]) -> Iterator[tuple[str, Callable[[str], str | None]]]:
        """Ways in which names of one model come to differ, each with what gives a missing name's stored one."""

        def without(prefix: str, fqn: str) -> str | None:
            name = fqn.removeprefix(prefix)
            return name if name != fqn and name in names else None

        def below(prefix: str, fqn: str) -> str | None:
            return prefix + fqn if prefix + fqn in names else None

        def unwrapped(part: str, fqn: str) -> str | None:
            name = _unwrapped(fqn, part)
            return name if name != fqn and name in names else None

        for prefix in dict.fromkeys(self._prefixes_near(missing)):
            yield f"without {prefix!r} in front", functools.partial(without, prefix)
            yield f"with {prefix!r} in front", functools.partial(below, prefix)
        for part in _WRAPPERS:
            yield f"without {part + '.'!r}", functools.partial(unwrapped, part)
            wrapped = {name: found for found in names if (name := _unwrapped(found, part)) != found}
            if wrapped:
                yield f"with {part + '.'!r}", wrapped.get

    def _prefixes_near(self, fqns: Sequence[str]) -> Iterator[str]:
        """What stands before other components in a few of the names, and before a few of them in stored names."""
        for fqn in dict.fromkeys([fqns[0], fqns[len(fqns) // 2], fqns[-1]]):
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


def _unwrapped(fqn: str, part: str) -> str:
    """The name without a component, wherever it stands.

    >>> _unwrapped("model._orig_mod.layers.0.module.w", "_orig_mod")
    'model.layers.0.module.w'
    """
    return ".".join(each for each in fqn.split(".") if each != part) if part in fqn else fqn
