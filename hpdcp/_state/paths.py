"""Where a value lies in a state dict: the keys to it, with their types and the kinds of containers they are steps into.

A path is kept as text beside each name on record, and paths alone rebuild the nesting they were taken from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import torch

from hpdcp._base.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    LoadMismatchError,
    StateDictError,
    UnsupportedTypeError,
)
from hpdcp._state._array_data import NotTypedError
from hpdcp._state._classes import MissingClassError, class_name, find_class, is_namedtuple
from hpdcp._state._typed_json import MAX_DEPTH, Encoder, Json, TooDeepError, dumps
from hpdcp._state._typed_reading import loads
from hpdcp._state._wrapper_kinds import class_of, is_wrapper_kind, wrapper_kind

Keys: TypeAlias = tuple[Hashable, ...]

_DICT: Final = "dict"
_LIST: Final = "list"
_TUPLE: Final = "tuple"
_ORDERED: Final = "OrderedDict"
"""Kinds of step. Any other is a named tuple's `module:class`, or that of a tensor made of tensors."""


class Path(tuple[Hashable, ...]):
    """The keys from the root to a value; equal to the plain tuple of them.

    `kinds` says for each key what it is a step into: "dict", "list", "tuple", "OrderedDict", a named tuple's
    `module:class`, or what `wrapper_kind` says of a tensor. A mapping of any other class counts as a dict, a sequence
    as the list or tuple it derives from.
    """

    kinds: tuple[str, ...]

    def __new__(cls, keys: Iterable[Hashable] = (), kinds: Iterable[str] | None = None) -> Path:
        path = super().__new__(cls, keys)
        path.kinds = (_DICT,) * len(path) if kinds is None else tuple(kinds)
        if len(path.kinds) != len(path):
            raise InvalidArgumentError(f"path {tuple(path)} has {len(path)} keys but {len(path.kinds)} kinds.")
        return path

    def __reduce__(self) -> tuple[type[Path], tuple[Keys, tuple[str, ...]]]:
        return Path, (tuple(self), self.kinds)

    def step(self, key: Hashable, kind: str) -> Path:
        """This path and one step more."""
        path = tuple.__new__(Path, (*self, key))
        path.kinds = (*self.kinds, kind)
        return path


def fqn_of(path: Sequence[Hashable]) -> str:
    """The name of a path.

    >>> fqn_of(("optimizer", "state", 0, "exp_avg"))
    'optimizer.state.0.exp_avg'
    """
    return ".".join(map(text_of, path))


def text_of(key: Hashable) -> str:
    """The part of a name that a key is; UnsupportedTypeError where it has no text."""
    try:
        return str(key)
    except ValueError as error:
        # Python writes no integer of more than 4300 digits.
        raise UnsupportedTypeError(f"a key has no text that could be its name ({error}). Use a shorter one.") from error


def encode_path(path: Sequence[Hashable]) -> str:
    """The path as text, keys and kinds exact. UnsupportedTypeError for a key that typed JSON does not know.

    A str or int key of a dict is itself; any other step is a list of the key and, unless it is a list's, the kind.

    >>> encode_path(Path(("state", 0, 2, "w"), ("dict", "dict", "list", "OrderedDict")))
    '["state",0,[2],["w","OrderedDict"]]'
    """
    kinds = path.kinds if isinstance(path, Path) else (_DICT,) * len(path)
    encoder = Encoder(None)
    steps: list[Json] = []
    try:
        for key, kind in zip(path, kinds, strict=True):
            step = encoder.encode(key)
            steps.append(step if kind == _DICT else [step] if kind == _LIST else [step, kind])
    except (NotTypedError, TooDeepError) as error:
        raise UnsupportedTypeError(
            f"{fqn_of(path)!r} has a key of type {error}, which cannot be stored exactly. "
            "Use str, int, or tuples and other plain values of them."
        ) from error
    return dumps(steps)


def encode_paths(paths: Sequence[Path]) -> list[str]:
    """`encode_path` of each; what a key and its kind are written as is worked out once."""
    known: dict[tuple[str | int, str], str] = {}
    found: list[str] = []
    for path in paths:
        steps: list[str] = []
        for key, kind in zip(path, path.kinds, strict=True):
            if not (isinstance(key, (str, int)) and type(key) in (str, int)):
                # It may be equal to a key that is written otherwise, as True is to 1.
                break
            step = known.get((key, kind))
            if step is None:
                plain = kind == _DICT and isinstance(key, str) and key.isascii()
                step = dumps(key) if plain else encode_path(Path((key,), (kind,)))[1:-1]
                known[key, kind] = step
            steps.append(step)
        found.append(f"[{','.join(steps)}]" if len(steps) == len(path) else encode_path(path))
    return found


def decode_path(text: str) -> Path:
    """The path that `encode_path` made `text` from; CorruptCheckpointError for anything else."""
    try:
        steps = loads(text)
        if type(steps) is not list or len(steps) > MAX_DEPTH:
            raise ValueError("it is not a list of steps")
        pairs = [_read_step(step) for step in steps]
        path = Path((key for key, _ in pairs), (kind for _, kind in pairs))
        hash(path)
    except MissingClassError as error:
        raise LoadMismatchError(f"path {text[:200]} has a key that needs {error}.") from error
    except Exception as error:
        # Damaged text can end in any exception of any constructor.
        raise CorruptCheckpointError(
            f"path {text[:200]!r} in the metadata cannot be read ({error}): it is damaged. Load an earlier checkpoint."
        ) from error
    return path


def _read_step(step: Any) -> tuple[Hashable, str]:
    if type(step) is not list:
        return step, _DICT
    if len(step) == 1:
        return step[0], _LIST
    key, kind = step
    if type(kind) is not str:
        raise ValueError(f"kind {kind!r} is not a name")
    return key, kind


def step_kind(container: object, fqn: str) -> str:
    """What a step into `container`, which has the name `fqn`, is called in a path.

    Raises UnsupportedTypeError for a tensor made of tensors that keeps some of them for itself.
    """
    kind = type(container)
    if kind is dict:
        return _DICT
    if isinstance(container, list):
        return _LIST
    if isinstance(container, tuple):
        return class_name(kind) if is_namedtuple(kind) else _TUPLE
    if kind is OrderedDict:
        return _ORDERED
    return wrapper_kind(container, fqn) if isinstance(container, torch.Tensor) else _DICT


def path_below(path: Path, fqn: str) -> Path | None:
    """What follows the keys that spell `fqn`; None where none do.

    >>> path_below(Path(("model", "a.b", 0)), "model.a.b")
    (0,)
    """
    for depth in range(1, len(path) + 1):
        name = fqn_of(path[:depth])
        if len(name) >= len(fqn):
            return Path(path[depth:], path.kinds[depth:]) if name == fqn else None
    return None


_NOTHING: Final = object()


def _is_empty(value: object) -> bool:
    return type(value) in (dict, OrderedDict) and not value


@dataclass(slots=True)
class _Branch:
    """A container while it is rebuilt."""

    kind: str
    items: dict[Hashable, Any]

    def build(self, where: Keys) -> Any:
        values = {
            key: item.build((*where, key)) if isinstance(item, _Branch) else item for key, item in self.items.items()
        }
        if self.kind == _DICT:
            return values
        if is_wrapper_kind(self.kind):
            raise LoadMismatchError(
                f"{fqn_of(where)!r} was saved as a {class_of(self.kind)}, which cannot be made of what is on record. "
                "Load it into a tensor of that class."
            )
        if self.kind == _ORDERED:
            return OrderedDict(values)
        try:
            listed = [values[index] for index in range(len(values))]
        except KeyError as error:
            raise StateDictError(
                f"{fqn_of(where)!r} is a {self.kind} of which only the items {sorted(map(str, values))} are given: "
                f"item {error} is missing."
            ) from None
        if self.kind == _LIST:
            return listed
        return tuple(listed) if self.kind == _TUPLE else self._named(listed, where)

    def _named(self, values: list[Any], where: Keys) -> tuple[Any, ...]:
        try:
            found = find_class(self.kind)
        except MissingClassError as error:
            raise LoadMismatchError(f"{fqn_of(where)!r} needs {error}.") from error
        if not is_namedtuple(found) or len(vars(found)["_fields"]) != len(values):
            raise LoadMismatchError(
                f"{fqn_of(where)!r} needs {self.kind} with {len(values)} fields, which it is not here."
            )
        return cast("tuple[Any, ...]", tuple.__new__(found, values))


def build_tree(pairs: Iterable[tuple[Sequence[Hashable], Any]]) -> dict[Any, Any]:
    """The nested state dict that has each value at its path; dicts in the order in which paths first name their keys.

    Kinds come from `Path`s; a plain tuple is a path through dicts only. An empty mapping gives way to one with items:
    some ranks may have had nothing there. Raises StateDictError when paths contradict each other or a list lacks an
    item, and LoadMismatchError when the class of a named tuple is not imported here, or is another one, and for tensors
    that were made of tensors.
    """
    root: _Branch | None = None
    for path, value in pairs:
        kinds = path.kinds if isinstance(path, Path) else (_DICT,) * len(path)
        if not kinds or kinds[0] not in (_DICT, _ORDERED):
            raise StateDictError(f"path {tuple(path)} does not start in a dict.")
        if root is None:
            root = _Branch(kinds[0], {})
        branch = root
        for depth, key in enumerate(path):
            if branch.kind != kinds[depth]:
                raise StateDictError(
                    f"{fqn_of(path[:depth])!r} is a {branch.kind} on one path and a {kinds[depth]} on another."
                )
            if depth == len(path) - 1:
                there = branch.items.get(key, _NOTHING)
                if isinstance(there, _Branch) and _is_empty(value):
                    break
                if there is not _NOTHING and not _is_empty(there):
                    raise StateDictError(f"{fqn_of(path)!r} is given twice, or holds a value and other paths as well.")
                branch.items[key] = value
                break
            inner = branch.items.get(key, _NOTHING)
            if inner is _NOTHING or _is_empty(inner):
                inner = branch.items[key] = _Branch(kinds[depth + 1], {})
            if not isinstance(inner, _Branch):
                raise StateDictError(f"{fqn_of(path[: depth + 1])!r} is a value, and {fqn_of(path)!r} would be inside.")
            branch = inner
    return {} if root is None else cast("dict[Any, Any]", root.build(()))


def build_value(parts: Iterable[tuple[Path, Any]]) -> Any:
    """One value from what lies at each path inside it; an empty path is the value itself. Raises as `build_tree`."""
    # A tree starts in a dict, whatever this one starts in.
    return build_tree((Path(("", *path), (_DICT, *path.kinds)), value) for path, value in parts)[""]
