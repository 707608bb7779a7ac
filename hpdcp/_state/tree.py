"""Walking a state dict: which values are stored on their own, under which names, and how they are put back.

A dict, list or tuple is walked into when anything below it is *stateful*: a tensor, a `PerRank`, or an object with
`state_dict` and `load_state_dict`. A subtree without any is one Python value, stored as a whole: so an optimizer's
tensors are entries of their own, while its list of hyper-parameters comes back as it was, grown or shrunk. The root is
always walked into.

    {"model": {"w": Tensor}, "lrs": [0.1, 0.2], 3: (Tensor, {})}
      fqn "model.w"   path ("model", "w")   a tensor
      fqn "lrs"       path ("lrs",)         the value [0.1, 0.2]
      fqn "3.0"       path (3, 0)           a tensor
      fqn "3.1"       path (3, 1)           the value {}

A path's keys keep their types, and a `Path` also knows which kind of container each key is a step into, so paths alone
rebuild the nesting.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

import torch

from hpdcp._base.errors import InvalidArgumentError, MissingKeysError, StateDictError, UnsupportedTypeError
from hpdcp._format.metadata import PerRank
from hpdcp._state._typed_json import MAX_DEPTH, class_name
from hpdcp._state.paths import Keys, Path, build_tree, fqn_of, step_kind


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One value that is stored on its own."""

    fqn: str
    path: Path
    value: Any
    """A tensor, or a Python value without anything stateful in it."""
    owner: int | None
    """The rank, under a `PerRank`; None for state all ranks share."""


class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


class _Kind(Enum):
    """What the walk does with a value."""

    OBJECT = auto()
    TENSOR = auto()
    WRAPPER = auto()  # a tensor made of several tensors
    PER_RANK = auto()
    STATEFUL = auto()
    MAPPING = auto()
    SEQUENCE = auto()


_CONTAINERS: Final = frozenset({_Kind.MAPPING, _Kind.SEQUENCE})
_TENSORS: Final = frozenset({_Kind.TENSOR, _Kind.WRAPPER})

_TOLD_BY_TYPE: Final[Mapping[type, _Kind]] = MappingProxyType(
    {
        **dict.fromkeys((int, float, bool, str, bytes, complex, type(None)), _Kind.OBJECT),
        **dict.fromkeys((torch.Tensor, torch.nn.Parameter), _Kind.TENSOR),
        dict: _Kind.MAPPING,
        list: _Kind.SEQUENCE,
    }
)
"""Types seen often; asking a tensor whether it is one goes through a metaclass, at a microsecond a time."""


def _kind_of(value: object) -> _Kind:
    kind = type(value)
    told = _TOLD_BY_TYPE.get(kind)
    if told is not None:
        return told
    if isinstance(value, torch.Tensor):
        # A class that lists its own chunks (DTensor, LocalShardsWrapper) is one tensor, whatever it wraps.
        wraps = hasattr(kind, "__tensor_flatten__") and not hasattr(kind, "__create_chunk_list__")
        return _Kind.WRAPPER if wraps else _Kind.TENSOR
    if isinstance(value, PerRank):
        return _Kind.PER_RANK
    if (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    ):
        return _Kind.STATEFUL
    if isinstance(value, (list, tuple)):
        return _Kind.SEQUENCE
    return _Kind.MAPPING if isinstance(value, Mapping) else _Kind.OBJECT


def _items(container: Any) -> Iterator[tuple[Hashable, object]]:
    """Key and value of all that a mapping, a sequence or (by name) a tensor made of tensors holds."""
    if isinstance(container, Mapping):
        return iter(container.items())
    if isinstance(container, torch.Tensor):
        names, _ = container.__tensor_flatten__()  # type: ignore[attr-defined]
        return ((name, getattr(container, name)) for name in names)
    return enumerate(container)


@dataclass(slots=True)
class _Loading:
    """A stateful object, and the state dict that is filled for it."""

    target: _Stateful
    state: Any
    fqn: str | None = None
    """Where the walk met it first."""


class _Place:
    """A container on the way to leaves, and where it sits itself, so that an immutable one can be replaced."""

    __slots__ = ("container", "key", "parent")

    def __init__(self, container: Any, parent: _Place | None, key: Hashable) -> None:
        self.container = container
        self.parent = parent
        self.key = key

    def put(self, key: Hashable, value: Any) -> None:
        held = self.container
        if isinstance(held, PerRank):
            held.value = value
        elif isinstance(held, _Loading):
            held.state = value
        elif isinstance(held, tuple) and self.parent is not None:
            self.container = _replaced(held, cast(int, key), value)
            self.parent.put(self.key, self.container)
        elif isinstance(held, (MutableMapping, list)):
            cast("MutableMapping[Hashable, Any]", held)[key] = value
        else:
            raise UnsupportedTypeError(
                f"{key!r} cannot be put back into a {class_name(type(held))}, which does not let its items be set. "
                "Use a dict or a list."
            )


def _replaced(held: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    items = [*held]
    items[index] = value
    if hasattr(type(held), "n_sequence_fields"):
        # Named tuples made in C (torch.return_types) cannot be made any other way.
        return type(held)(items)
    return tuple.__new__(type(held), items)


class _EndlessError(Exception):
    """A container within itself, or nesting beyond `MAX_DEPTH`; gathers the path as it unwinds."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Hashable] = []


class StateTree:
    """A state dict, walked once: its leaves, and the way to put loaded values back in place.

    Calls `state_dict()` of every stateful object once, in the order of the state dict. `assign` writes one value;
    `finish`, after the last, hands the filled state dicts to `load_state_dict`.

    Raises InvalidArgumentError when `state_dict` is no mapping, StateDictError when two paths have one fqn, and
    UnsupportedTypeError for a container that contains itself or nests more than `MAX_DEPTH` levels.
    """

    def __init__(self, state_dict: Mapping[Any, Any], *, rank: int) -> None:
        self._walk = _Walk(state_dict, rank=rank)
        self._opened: dict[Keys, list[Leaf]] = {}

    @property
    def leaves(self) -> list[Leaf]:
        """Every leaf, in the order of the state dict."""
        return self._walk.leaves

    @property
    def every_rank(self) -> list[Leaf]:
        """Every `PerRank.all`, itself the value. A load assigns a list of all ranks' values to each one's path, instead
        of loading the leaves below it."""
        return self._walk.every_rank

    def assign(self, path: Sequence[Hashable], value: Any) -> None:
        """Put `value` where the leaf at `path` was: in place in dicts and lists, in a new tuple where there was one.

        Raises MissingKeysError when no leaf (of the walk, of `every_rank` or of `children`) has that path, and
        UnsupportedTypeError when what holds it does not let items be set.
        """
        place, key = self._place_of(path)
        place.put(key, value)

    def children(self, leaf: Leaf) -> list[Leaf]:
        """The items of a leaf that is a dict, list or tuple, as leaves that `assign` knows; none of any other leaf.

        For a value that is stored in pieces, because it held tensors when it was saved. Call it before anything is
        assigned to the leaf itself.
        """
        if leaf.path not in self._opened:
            self._opened[leaf.path] = self._walk.open(leaf, *self._place_of(leaf.path))
        return self._opened[leaf.path]

    def finish(self) -> None:
        """Call `load_state_dict` of every stateful object once, innermost first, with its filled state dict.

        What it raises goes to the caller, with a note that names the object. A second call does nothing.
        """
        pending, self._walk.loading = self._walk.loading, []
        for item in pending:
            try:
                item.target.load_state_dict(item.state)
            except Exception as error:
                error.add_note(f"while loading the state of {item.fqn!r} ({class_name(type(item.target))})")
                raise

    def _place_of(self, path: Sequence[Hashable]) -> tuple[_Place, Hashable]:
        found = self._walk.places.get(tuple(path))
        if found is None:
            raise MissingKeysError(f"{fqn_of(path)!r} is not a leaf of this state dict, so nothing can be put there.")
        return found


class _Walk:
    """One walk. Without a `rank`, what is no plain container stays whole: `PerRank`, and tensors made of tensors."""

    def __init__(self, state_dict: Mapping[Any, Any], *, rank: int | None) -> None:
        self.leaves: list[Leaf] = []
        self.every_rank: list[Leaf] = []
        self.loading: list[_Loading] = []
        """Stateful objects, innermost first."""
        self.places: dict[Keys, tuple[_Place, Hashable]] = {}
        self._rank = rank
        self._paths: dict[str, Path] = {}
        # By id, with the object itself: an id stays its own only while the object lives.
        self._scanned: dict[int, tuple[object, bool | None]] = {}
        self._states: dict[int, _Loading] = {}
        self._run(state_dict)

    def open(self, leaf: Leaf, holder: _Place, key: Hashable) -> list[Leaf]:
        """The items of a leaf that is a container, as leaves."""
        if _kind_of(leaf.value) not in _CONTAINERS:
            return []
        place = _Place(leaf.value, holder, key)
        kind = step_kind(leaf.value)
        return [
            self._leaf(f"{leaf.fqn}.{item_key!s}", leaf.path.step(item_key, kind), item, leaf.owner, (place, item_key))
            for item_key, item in _items(leaf.value)
        ]

    def _run(self, state_dict: Mapping[Any, Any]) -> None:
        if not isinstance(state_dict, Mapping):
            raise InvalidArgumentError(
                f"a state dict is a mapping from names to values; this is a {class_name(type(state_dict))}."
            )
        try:
            self._scan(state_dict, _Kind.MAPPING, 0)
        except _EndlessError as error:
            keys = error.keys[::-1]
            where = fqn_of(keys[:8]) + (" …" if len(keys) > 8 else "")
            raise UnsupportedTypeError(
                f"{where!r} is nested more than {MAX_DEPTH} levels deep, or contains itself; such a state dict cannot "
                "be stored. Flatten it, or break the cycle."
            ) from None
        self._visit_items(_Place(state_dict, None, None), Path(), "", None)

    def _scan(self, value: Any, kind: _Kind, depth: int) -> bool:
        """Whether `value`, or anything below it, is stateful; remembered, since the walk asks again level by level."""
        if kind is _Kind.OBJECT:
            return False
        if kind in _TENSORS or (kind is _Kind.PER_RANK and self._rank is None):
            return True
        seen = self._scanned.get(id(value))
        if seen is not None and seen[1] is not None:
            return seen[1]
        if seen is not None or depth > MAX_DEPTH:
            raise _EndlessError
        self._scanned[id(value)] = (value, None)
        found = kind not in _CONTAINERS
        for key, item in self._inside(value, kind):
            item_kind = _kind_of(item)
            if item_kind is _Kind.OBJECT:
                continue
            try:
                found |= self._scan(item, item_kind, depth + 1)
            except _EndlessError as error:
                if kind in _CONTAINERS:
                    error.keys.append(key)
                raise
        self._scanned[id(value)] = (value, found)
        return found

    def _inside(self, value: Any, kind: _Kind) -> Iterator[tuple[Hashable, object]]:
        if kind is _Kind.PER_RANK:
            return iter([(None, value.value)])
        if kind is _Kind.STATEFUL:
            loading = self._states[id(value)] = _Loading(value, value.state_dict())
            return iter([(None, loading.state)])
        return _items(value)

    def _visit(self, value: Any, path: Path, fqn: str, owner: int | None, place: tuple[_Place, Hashable]) -> None:
        kind = _kind_of(value)
        if kind is _Kind.TENSOR or not self._scan(value, kind, 0):
            self.leaves.append(self._leaf(fqn, path, value, owner, place))
        elif kind in _CONTAINERS:
            self._visit_items(_Place(value, *place), path, fqn, owner)
        elif kind is _Kind.STATEFUL:
            self._visit_stateful(self._states[id(value)], path, fqn, owner, place)
        elif self._rank is None:
            self.leaves.append(self._leaf(fqn, path, value, owner, place))
        elif kind is _Kind.WRAPPER:
            self._visit_items(_Place(value, *place), path, fqn, owner)
        else:
            inner = _Place(value, *place)
            if value.every_rank:
                self.every_rank.append(Leaf(fqn, path, value, self._rank))
                self.places[path] = (inner, None)
            self._visit(value.value, path, fqn, self._rank, (inner, None))

    def _visit_stateful(
        self, loading: _Loading, path: Path, fqn: str, owner: int | None, place: tuple[_Place, Hashable]
    ) -> None:
        is_new = loading.fqn is None
        if is_new:
            loading.fqn = fqn
        self._visit(loading.state, path, fqn, owner, (_Place(loading, *place), None))
        if is_new:
            self.loading.append(loading)

    def _visit_items(self, place: _Place, path: Path, fqn: str, owner: int | None) -> None:
        container = place.container
        kind = step_kind(container)
        prefix = f"{fqn}." if path else ""
        for key, item in _items(container):
            self._visit(item, path.step(key, kind), f"{prefix}{key!s}", owner, (place, key))

    def _leaf(self, fqn: str, path: Path, value: Any, owner: int | None, place: tuple[_Place, Hashable]) -> Leaf:
        other = self._paths.setdefault(fqn, path)
        if other is not path:
            raise StateDictError(
                f"{tuple(other)} and {tuple(path)} both have the name {fqn!r}, so only one of them could be stored. "
                "Rename a key."
            )
        self.places[path] = place
        return Leaf(fqn, path, value, owner)


def walk(state_dict: Mapping[Any, Any], *, rank: int) -> list[Leaf]:
    """Every leaf of `state_dict`, in its order; `rank` owns what is under `PerRank`. Raises as `StateTree` does."""
    return StateTree(state_dict, rank=rank).leaves


def pick(value: Any, subpath: Sequence[Hashable]) -> Any:
    """What lies at `subpath` inside a Python value; MissingKeysError when there is nothing.

    For a value that was stored whole, when the state dict has tensors beside it now.
    """
    for depth, key in enumerate(subpath):
        if _kind_of(value) not in _CONTAINERS:
            raise MissingKeysError(
                f"the stored value has nothing at {fqn_of(subpath[: depth + 1])!r}, but a {class_name(type(value))}."
            )
        try:
            value = value[key]
        except (LookupError, TypeError) as error:
            raise MissingKeysError(f"the stored value has nothing at {fqn_of(subpath[: depth + 1])!r}.") from error
    return value


def flatten_state_dict(state_dict: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """The state dict as one flat dict by fqn, and the path of each name.

    Follows the rules of `save`: what holds a tensor, a `PerRank` or a stateful object is walked into, a stateful
    object is replaced by its state dict, and every other value stays whole. `PerRank` marks and tensor subclasses stay
    as they are; attributes of containers (torch's `_metadata`) are left behind. Raises as `StateTree` does.

    >>> flat, mappings = flatten_state_dict({"a": {1: torch.ones(2)}, "steps": [1, 2]})
    >>> list(flat), mappings
    (['a.1', 'steps'], {'a.1': ('a', 1), 'steps': ('steps',)})
    """
    leaves = _Walk(state_dict, rank=None).leaves
    return {leaf.fqn: leaf.value for leaf in leaves}, {leaf.fqn: leaf.path for leaf in leaves}


def unflatten_state_dict(flat: Mapping[str, Any], mappings: Mapping[str, Sequence[Hashable]]) -> dict[Any, Any]:
    """What `flatten_state_dict` flattened, from both its results: keys, nesting, order and kinds of containers exact.

    Names of `mappings` that `flat` leaves out are left out of the result. Raises MissingKeysError for names of `flat`
    without a path, and as `build_tree` does.
    """
    unknown = [name for name in flat if name not in mappings]
    if unknown:
        raise MissingKeysError(
            f"no path is given for {', '.join(map(repr, unknown))}: pass the mappings that flattening returned."
        )
    return build_tree((path, flat[name]) for name, path in mappings.items() if name in flat)
