"""What a walk does with each value of a state dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Final

import torch

from hpdcp._format.metadata import PerRank


class Kind(Enum):
    """What the walk does with a value."""

    OBJECT = auto()
    TENSOR = auto()
    WRAPPER = auto()  # a tensor made of several tensors
    PER_RANK = auto()
    STATEFUL = auto()
    MAPPING = auto()
    SEQUENCE = auto()


CONTAINERS: Final = frozenset({Kind.MAPPING, Kind.SEQUENCE})
TENSORS: Final = frozenset({Kind.TENSOR, Kind.WRAPPER})

_TOLD_BY_TYPE: Final[Mapping[type, Kind]] = MappingProxyType(
    {
        **dict.fromkeys((int, float, bool, str, bytes, complex, type(None)), Kind.OBJECT),
        **dict.fromkeys((torch.Tensor, torch.nn.Parameter), Kind.TENSOR),
        dict: Kind.MAPPING,
        list: Kind.SEQUENCE,
    }
)
"""Types seen often; asking a tensor whether it is one goes through a metaclass, at a microsecond a time."""


def kind_of(value: object) -> Kind:
    """What the walk does with `value`."""
    kind = type(value)
    told = _TOLD_BY_TYPE.get(kind)
    if told is not None:
        return told
    if isinstance(value, torch.Tensor):
        # A class that lists its own chunks (DTensor, LocalShardsWrapper) is one tensor, whatever it wraps.
        # So is the result of a collective that is under way, which has `trigger_wait`.
        whole = hasattr(kind, "__create_chunk_list__") or hasattr(kind, "trigger_wait")
        wraps = hasattr(kind, "__tensor_flatten__") and not whole
        return Kind.WRAPPER if wraps else Kind.TENSOR
    if isinstance(value, PerRank):
        return Kind.PER_RANK
    if (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    ):
        return Kind.STATEFUL
    if isinstance(value, (list, tuple)):
        return Kind.SEQUENCE
    return Kind.MAPPING if isinstance(value, Mapping) else Kind.OBJECT


def items_of(container: Any) -> Iterator[tuple[Hashable, object]]:
    """Key and value of all that a mapping, a sequence or (by name) a tensor made of tensors holds."""
    if isinstance(container, Mapping):
        return iter(container.items())
    if isinstance(container, torch.Tensor):
        names, _ = container.__tensor_flatten__()  # type: ignore[attr-defined]
        return ((name, getattr(container, name)) for name in names)
    return enumerate(container)


_NAME_KEYS: Final = frozenset({str, int, bool, type(None)})
_LARGEST_INT: Final = 1 << 63
_LEFT_BEHIND: Final = frozenset({"_metadata"})
"""Attributes that a walk does not keep: torch puts one on the state dicts of modules, and loads well without."""


def is_walked_without_tensors(mapping: Mapping[Any, Any]) -> bool:
    """Whether a mapping with nothing stateful below it is stored value by value all the same.

    It is, unless paths could not make it again: another class than dict and OrderedDict (a defaultdict, a Counter, a
    user's own), keys of other types than str, int, bool, None and tuples of them, or two values that would have one
    name. An empty one is a value itself.
    """
    kind = type(mapping)
    if not mapping or not (
        kind is dict or (kind is OrderedDict and (not vars(mapping) or vars(mapping).keys() <= _LEFT_BEHIND))
    ):
        return False
    if not all(map(_is_name_key, mapping)):
        return False
    names = [str(key) for key in mapping]
    if any("." in name for name in names):
        names = list(_names_below(mapping))
    return len(set(names)) == len(names)


def _names_below(mapping: Mapping[Any, Any]) -> Iterator[str]:
    for key, item in mapping.items():
        if type(item) in (dict, OrderedDict) and is_walked_without_tensors(item):
            yield from (f"{key!s}.{name}" for name in _names_below(item))
        else:
            yield str(key)


def _is_name_key(key: object) -> bool:
    kind = type(key)
    if kind is int:
        return -_LARGEST_INT < key < _LARGEST_INT  # type: ignore[operator]  # `kind` says what it is
    return kind in _NAME_KEYS or (isinstance(key, tuple) and kind is tuple and all(map(_is_name_key, key)))


def has_identity(key: Any) -> bool:
    """Whether a key is the same in every process: no tensor, and no object that is told apart by its address alone."""
    kind = type(key)
    if kind in _NAME_KEYS:
        return True
    if isinstance(key, (tuple, frozenset)):
        return all(map(has_identity, key))
    if isinstance(key, torch.Tensor):
        return False
    printed = {getattr(kind, "__repr__", None), getattr(kind, "__str__", None)}
    return isinstance(key, type) or printed != {object.__repr__, object.__str__}
