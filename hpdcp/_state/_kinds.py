"""What a walk does with each value of a state dict."""

from __future__ import annotations

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
