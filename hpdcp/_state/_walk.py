"""One walk over a state dict: its leaves, their names, and what holds each of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hpdcp._base.errors import InvalidArgumentError, StateDictError, UnsupportedTypeError
from hpdcp._state._classes import class_name
from hpdcp._state._holders import Holder, Loading
from hpdcp._state._kinds import (
    CONTAINERS,
    TENSORS,
    Kind,
    has_identity,
    is_walked_without_tensors,
    items_of,
    kind_of,
)
from hpdcp._state._typed_json import MAX_DEPTH
from hpdcp._state.paths import Keys, Path, fqn_of, step_kind, text_of

_GROUPS: Final = "param_groups"
"""Where every optimizer of torch keeps its settings."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One value that is stored on its own."""

    fqn: str
    path: Path
    value: Any
    """A tensor, or a Python value without anything stateful in it."""
    owner: int | None
    """The rank, under a `PerRank`; None for state all ranks share."""


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """A dict, list or tuple that was walked into."""

    fqn: str
    path: Path
    owner: int | None
    holder: Holder
    is_module: bool = False
    """The state of a module, which names all that it has and refuses more."""

    @property
    def value(self) -> Any:
        return self.holder.container


@dataclass(frozen=True, slots=True, eq=False)
class OpenRoot:
    """A container that asks for every Python value stored below it, besides those that it names."""

    container: Container
    is_groups: bool
    """An optimizer's groups: a tensor without dimensions is a value there, such as a learning rate."""


class _RefusedError(Exception):
    """What is below some key cannot be walked, and why; gathers the path as it unwinds."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.keys: list[Hashable] = []


class Walk:
    """One walk. Without a `rank`, what is no plain container stays whole: `PerRank`, and tensors made of tensors."""

    def __init__(self, state_dict: Mapping[Any, Any], *, rank: int | None) -> None:
        self.leaves: list[Leaf] = []
        self.every_rank: list[Leaf] = []
        self.loading: list[Loading] = []
        """Stateful objects, innermost first, and else in the order of their names, which is the same on all ranks."""
        self.holders: dict[Keys, tuple[Holder, Hashable]] = {}
        self.containers: dict[str, Container] = {}
        """By fqn, without the root."""
        self.wrappers: dict[str, str] = {}
        """The kind of every tensor that is made of others, by fqn."""
        self.open_roots: list[OpenRoot] = []
        """Innermost first."""
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
        kind = step_kind(leaf.value, leaf.fqn)
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
        except _RefusedError as error:
            keys = error.keys[::-1]
            where = fqn_of(keys[:8]) + (" …" if len(keys) > 8 else "")
            raise UnsupportedTypeError(f"{where!r} {error}" if where else f"the state dict {error}") from None
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
            raise _RefusedError(
                f"is nested more than {MAX_DEPTH} levels deep, or contains itself; such a state dict cannot "
                "be stored. Flatten it, or break the cycle."
            )
        self._scanned[id(value)] = (value, None)
        found = kind not in CONTAINERS
        if kind is Kind.MAPPING:
            _check_keys(value)
        deeper: list[tuple[Hashable, object, Kind]] = []
        for key, item in self._inside(value, kind):
            item_kind = kind_of(item)
            if item_kind is Kind.TENSOR:
                found = True
            elif item_kind is not Kind.OBJECT:
                deeper.append((key, item, item_kind))
        if kind is Kind.MAPPING and len(deeper) > 1:
            # By name, as on all ranks: an object's `state_dict()` may wait for that of the other ranks.
            deeper.sort(key=lambda each: text_of(each[0]))
        for key, item, item_kind in deeper:
            try:
                found |= self._scan(item, item_kind, depth + 1)
            except _RefusedError as error:
                if kind in CONTAINERS:
                    error.keys.append(key)
                raise
        if kind is Kind.STATEFUL:
            self.loading.append(self._states[id(value)])
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
        if kind is Kind.TENSOR or kind is Kind.OBJECT:
            self.leaves.append(self._leaf(fqn, path, value, owner, holder))
        elif not self._scan(value, kind, 0):
            if kind is Kind.MAPPING and is_walked_without_tensors(value):
                self._visit_items(Holder(value, *holder), path, fqn, owner)
            else:
                self.leaves.append(self._leaf(fqn, path, value, owner, holder))
        elif kind in CONTAINERS:
            self._visit_items(Holder(value, *holder), path, fqn, owner)
        elif kind is Kind.STATEFUL:
            self._visit_stateful(self._states[id(value)], path, fqn, owner, holder)
        elif self._rank is None:
            self.leaves.append(self._leaf(fqn, path, value, owner, holder))
        elif kind is Kind.WRAPPER:
            self.wrappers[fqn] = self._visit_items(Holder(value, *holder), path, fqn, owner)
        else:
            inner = Holder(value, *holder)
            if value.every_rank:
                self.every_rank.append(Leaf(fqn, path, value, self._rank))
                self.holders[path] = (inner, None)
            self._visit(value.value, path, fqn, self._rank, (inner, None))
            self._open(fqn)

    def _visit_stateful(
        self, loading: Loading, path: Path, fqn: str, owner: int | None, holder: tuple[Holder, Hashable]
    ) -> None:
        if loading.fqn is None:
            loading.fqn = fqn
        self._visit(loading.state, path, fqn, owner, (Holder(loading, *holder), None))
        if not loading.is_module:
            self._open(fqn)

    def _open(self, fqn: str, *, is_groups: bool = False) -> None:
        container = self.containers.get(fqn)
        if container is not None and not container.is_module:
            self.open_roots.append(OpenRoot(container, is_groups))

    def _visit_items(self, holder: Holder, path: Path, fqn: str, owner: int | None) -> str:
        """Visit what a container has; what steps into it are called."""
        container = holder.container
        kind = step_kind(container, fqn)
        prefix = f"{fqn}." if path else ""
        if path:
            self.containers[fqn] = Container(fqn, path, owner, holder, hasattr(container, "_metadata"))
        for key, item in items_of(container):
            self._visit(item, path.step(key, kind), prefix + text_of(key), owner, (holder, key))
        if path and path[-1] == _GROUPS:
            self._open(fqn, is_groups=True)
        return kind

    def _leaf(self, fqn: str, path: Path, value: Any, owner: int | None, holder: tuple[Holder, Hashable]) -> Leaf:
        other = self._paths.setdefault(fqn, path)
        if other is not path:
            raise StateDictError(
                f"{tuple(other)} and {tuple(path)} both have the name {fqn!r}, so only one of them could be stored. "
                "Rename a key."
            )
        self.holders[path] = holder
        return Leaf(fqn, path, value, owner)


def _check_keys(mapping: Mapping[Any, Any]) -> None:
    for key in mapping:
        if type(key) is not str and type(key) is not int and not has_identity(key):
            raise _RefusedError(
                f"has keys that are another object in every process (of type {class_name(type(key))}), so nothing "
                "could be found by them again. Use names or numbers; of an optimizer, store its state_dict() "
                "or the optimizer itself, not its `state`."
            )
