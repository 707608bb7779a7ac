"""One walk over a state dict: its leaves, their names, and what holds each of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpdcp._base.errors import InvalidArgumentError, StateDictError, UnsupportedTypeError
from hpdcp._state._classes import class_name
from hpdcp._state._holders import Holder, Loading
from hpdcp._state._kinds import CONTAINERS, TENSORS, Kind, items_of, kind_of
from hpdcp._state._typed_json import MAX_DEPTH
from hpdcp._state.paths import Keys, Path, fqn_of, step_kind, text_of


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One value that is stored on its own."""

    fqn: str
    path: Path
    value: Any
    """A tensor, or a Python value without anything stateful in it."""
    owner: int | None
    """The rank, under a `PerRank`; None for state all ranks share."""


class _EndlessError(Exception):
    """A container within itself, or nesting beyond `MAX_DEPTH`; gathers the path as it unwinds."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Hashable] = []


class Walk:
    """One walk. Without a `rank`, what is no plain container stays whole: `PerRank`, and tensors made of tensors."""

    def __init__(self, state_dict: Mapping[Any, Any], *, rank: int | None) -> None:
        self.leaves: list[Leaf] = []
        self.every_rank: list[Leaf] = []
        self.loading: list[Loading] = []
        """Stateful objects, innermost first."""
        self.holders: dict[Keys, tuple[Holder, Hashable]] = {}
        self._rank = rank
        self._paths: dict[str, Path] = {}
        # By id, with the object itself: an id stays its own only while the object lives.
        self._scanned: dict[int, tuple[object, bool | None]] = {}
        self._states: dict[int, Loading] = {}
        self._run(state_dict)

    def open(self, leaf: Leaf, holder: Holder, key: Hashable) -> list[Leaf]:
        """The items of a leaf that is a container, as leaves."""
        if kind_of(leaf.value) not in CONTAINERS:
            return []
        opened = Holder(leaf.value, holder, key)
        kind = step_kind(leaf.value)
        return [
            self._leaf(f"{leaf.fqn}.{item_key!s}", leaf.path.step(item_key, kind), item, leaf.owner, (opened, item_key))
            for item_key, item in items_of(leaf.value)
        ]

    def _run(self, state_dict: Mapping[Any, Any]) -> None:
        if not isinstance(state_dict, Mapping):
            raise InvalidArgumentError(
                f"a state dict is a mapping from names to values; this is a {class_name(type(state_dict))}."
            )
        try:
            self._scan(state_dict, Kind.MAPPING, 0)
        except _EndlessError as error:
            keys = error.keys[::-1]
            where = fqn_of(keys[:8]) + (" …" if len(keys) > 8 else "")
            raise UnsupportedTypeError(
                f"{where!r} is nested more than {MAX_DEPTH} levels deep, or contains itself; such a state dict cannot "
                "be stored. Flatten it, or break the cycle."
            ) from None
        self._visit_items(Holder(state_dict, None, None), Path(), "", None)

    def _scan(self, value: Any, kind: Kind, depth: int) -> bool:
        """Whether `value`, or anything below it, is stateful; remembered, since the walk asks again level by level."""
        if kind is Kind.OBJECT:
            return False
        if kind in TENSORS or (kind is Kind.PER_RANK and self._rank is None):
            return True
        seen = self._scanned.get(id(value))
        if seen is not None and seen[1] is not None:
            return seen[1]
        if seen is not None or depth > MAX_DEPTH:
            raise _EndlessError
        self._scanned[id(value)] = (value, None)
        found = kind not in CONTAINERS
        for key, item in self._inside(value, kind):
            item_kind = kind_of(item)
            if item_kind is Kind.OBJECT:
                continue
            try:
                found |= self._scan(item, item_kind, depth + 1)
            except _EndlessError as error:
                if kind in CONTAINERS:
                    error.keys.append(key)
                raise
        self._scanned[id(value)] = (value, found)
        return found

    def _inside(self, value: Any, kind: Kind) -> Iterator[tuple[Hashable, object]]:
        if kind is Kind.PER_RANK:
            return iter([(None, value.value)])
        if kind is Kind.STATEFUL:
            loading = self._states[id(value)] = Loading(value, value.state_dict())
            return iter([(None, loading.state)])
        return items_of(value)

    def _visit(self, value: Any, path: Path, fqn: str, owner: int | None, holder: tuple[Holder, Hashable]) -> None:
        kind = kind_of(value)
        if kind is Kind.TENSOR or not self._scan(value, kind, 0):
            self.leaves.append(self._leaf(fqn, path, value, owner, holder))
        elif kind in CONTAINERS:
            self._visit_items(Holder(value, *holder), path, fqn, owner)
        elif kind is Kind.STATEFUL:
            self._visit_stateful(self._states[id(value)], path, fqn, owner, holder)
        elif self._rank is None:
            self.leaves.append(self._leaf(fqn, path, value, owner, holder))
        elif kind is Kind.WRAPPER:
            self._visit_items(Holder(value, *holder), path, fqn, owner)
        else:
            inner = Holder(value, *holder)
            if value.every_rank:
                self.every_rank.append(Leaf(fqn, path, value, self._rank))
                self.holders[path] = (inner, None)
            self._visit(value.value, path, fqn, self._rank, (inner, None))

    def _visit_stateful(
        self, loading: Loading, path: Path, fqn: str, owner: int | None, holder: tuple[Holder, Hashable]
    ) -> None:
        is_new = loading.fqn is None
        if is_new:
            loading.fqn = fqn
        self._visit(loading.state, path, fqn, owner, (Holder(loading, *holder), None))
        if is_new:
            self.loading.append(loading)

    def _visit_items(self, holder: Holder, path: Path, fqn: str, owner: int | None) -> None:
        container = holder.container
        kind = step_kind(container)
        prefix = f"{fqn}." if path else ""
        for key, item in items_of(container):
            self._visit(item, path.step(key, kind), prefix + text_of(key), owner, (holder, key))

    def _leaf(self, fqn: str, path: Path, value: Any, owner: int | None, holder: tuple[Holder, Hashable]) -> Leaf:
        other = self._paths.setdefault(fqn, path)
        if other is not path:
            raise StateDictError(
                f"{tuple(other)} and {tuple(path)} both have the name {fqn!r}, so only one of them could be stored. "
                "Rename a key."
            )
        self.holders[path] = holder
        return Leaf(fqn, path, value, owner)
