"""The Python values that a load wants: which stored ones, what inside of them, and where each goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hpdcp._base.errors import LoadMismatchError, MissingKeysError, ShapeMismatchError
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan.load_plan import ReadItem
from hpdcp._state.mismatches import keys_that, listed
from hpdcp._state.paths import Keys
from hpdcp._state.tree import Leaf, pick

Take: TypeAlias = Callable[[Any], None]
"""Puts a value where it belongs, once everything has been read."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """Something inside one stored value."""

    fqn: str
    """The target's, for messages."""
    subpath: Keys
    """Where in the stored value; empty: all of it."""
    take: Take
    at_once: bool
    """Whether `take` only looks, and may raise before any more is read."""
    optional: bool
    """Whether it is no loss where there is nothing."""


class WantedValues:
    """Wishes by the stored value that grants them; each value is read once, and decoded as often as it is shared."""

    def __init__(self, metadata: Metadata, decode: Callable[[MetadataIndex, bytes], Any]) -> None:
        self._metadata = metadata
        self._decode = decode
        self._wishes: dict[MetadataIndex, list[_Wish]] = {}
        self._granted: list[tuple[Take, Any]] = []
        self._rebuilt: list[Callable[[], None]] = []
        self.items: list[ReadItem] = []

    def want(
        self,
        row: int,
        fqn: str,
        subpath: Sequence[Any],
        take: Take,
        *,
        at_once: bool = False,
        optional: bool = False,
    ) -> None:
        """Have `take` called with what is at `subpath` in the value stored in `row`."""
        entries = self._metadata.entries
        owner = int(entries.owners[row])
        index = MetadataIndex(entries.fqns[row], owner=None if owner < 0 else owner)
        if index not in self._wishes:
            self._wishes[index] = []
            self.items.append(ReadItem(index, self._metadata.chunk_rows(row)[0], (), (), (), EntryKind.OBJECT))
        self._wishes[index].append(_Wish(fqn, tuple(subpath), take, at_once, optional))

    def when_taken(self, build: Callable[[], None]) -> None:
        """Have `build` called once every value has been taken: it makes one of several."""
        self._rebuilt.append(build)

    def __contains__(self, index: MetadataIndex) -> bool:
        return index in self._wishes

    def apply(self, index: MetadataIndex, data: bytes, *, partial: bool) -> list[str]:
        """Decode what is stored and look for what is wanted of it; the targets whose values are not there.

        MissingKeysError names them, unless `partial`.
        """
        value = self._decode(index, data)
        lost: dict[str, str] = {}
        seen: set[Keys] = set()
        whole = any(not wish.subpath for wish in self._wishes[index])
        for wish in self._wishes[index]:
            # No two places may share one mutable value.
            again = wish.subpath in seen or (whole and bool(seen))
            seen.add(wish.subpath)
            try:
                found = pick(self._decode(index, data) if again else value, wish.subpath)
            except MissingKeysError as error:
                if not wish.optional:
                    lost[wish.fqn] = str(error)
                continue
            if wish.at_once:
                wish.take(found)
            else:
                self._granted.append((wish.take, found))
        if lost and not partial:
            first = next(iter(lost.values()))
            count = keys_that(len(lost), "are not in the checkpoint")
            raise MissingKeysError(
                f"{count}: {listed([*map(repr, lost)])} ({index.fqn!r}: {first}) "
                "Correct their names, or load what is there with StandardLoadPlanner(allow_partial_load=True)."
            )
        return list(lost)

    def finish(self) -> None:
        """Put everything in its place."""
        for take, value in self._granted:
            take(value)
        for build in self._rebuilt:
            build()


def check_length(fqn: str, wanted: int) -> Take:
    """A `take` that raises where a stored sequence has another length than the target."""

    def take(value: Any) -> None:
        if not isinstance(value, (list, tuple)):
            raise LoadMismatchError(f"{fqn!r} is stored as a {type(value).__name__}, wanted as a sequence.")
        if len(value) != wanted:
            raise ShapeMismatchError(f"{fqn!r} is stored with {len(value)} items, wanted with {wanted}.")

    return take


def is_setting(leaf: Leaf, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a setting of an optimizer's group, which may be a plain number as well: a learning rate."""
    return not shape and "param_groups" in leaf.path and leaf.path[-1] != "params"


def fill_number(fqn: str, target: torch.Tensor) -> Take:
    """A `take` that puts a stored number into a tensor of one element."""

    def take(value: Any) -> None:
        if type(value) not in (bool, int, float):
            raise LoadMismatchError(f"{fqn!r} is stored as a {type(value).__name__}, wanted as a tensor.")
        target.detach().fill_(value)

    return take
