"""How each type of value in a state dict is copied when a save is staged."""

from __future__ import annotations

import copy
import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpdcp._devices import device

T = TypeVar("T")
Copy = Callable[[Any], Any]

_UNCHANGING: Final = (
    int, float, bool, str, bytes, complex, type(None), range, slice, torch.Size, torch.dtype, torch.device,
    pathlib.PurePath, enum.Enum, uuid.UUID, decimal.Decimal, fractions.Fraction, np.generic,
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
)  # fmt: skip
"""Nobody can change these after a save was called, so they need no copy."""


class DataCopier:
    """Copies values by their type: the exact type first, else the most derived registered base.

    Tensors (a DTensor is one), plain containers and values that cannot change are known. Anything else is deep-copied,
    with one warning for each type; a type of one's own is registered once:

        @DataCopier.register(MyState)
        def copy_my_state(state: MyState) -> MyState: ...
    """

    _copies: ClassVar[dict[type, Copy]] = {}
    _warned: ClassVar[set[type]] = set()

    @classmethod
    def register(cls, kind: type) -> Callable[[Callable[[T], T]], Callable[[T], T]]:
        """Decorator: copies values of `kind`, and of classes derived from it that have no entry closer to them."""

        def keep(function: Callable[[T], T]) -> Callable[[T], T]:
            cls._copies[kind] = function
            return function

        return keep

    @classmethod
    def copy(cls, value: Any) -> Any:
        """A copy of `value` that does not change when `value` does; tensors come to the host."""
        kind = type(value)
        found = cls.find(kind)
        if found is not None:
            return found(value)
        if kind not in cls._warned:
            cls._warned.add(kind)
            warnings.warn(
                f"{kind.__module__}.{kind.__qualname__} has no copier and is deep-copied for every save. Register one "
                "with @DataCopier.register, or keep the state in tensors and plain values.",
                stacklevel=2,
            )
        return copy.deepcopy(value)

    @classmethod
    def find(cls, kind: type) -> Copy | None:
        """What copies values of `kind`; None when only a deep copy can."""
        return next((cls._copies[base] for base in kind.__mro__ if base in cls._copies), None)


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.detach().clone()
    host = device.to_host(tensor)
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host


def _copy_items(items: Any) -> Any:
    return type(items)(DataCopier.copy(item) for item in items)


def _copy_tuple(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple.__new__(type(items), [DataCopier.copy(item) for item in items])


def _copy_dict(items: dict[Any, Any]) -> dict[Any, Any]:
    copied = copy.copy(items)
    for key, value in items.items():
        copied[key] = DataCopier.copy(value)
    return copied


def _as_it_is(value: T) -> T:
    return value


def _copy_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.copy()


for _unchanging in _UNCHANGING:
    DataCopier.register(_unchanging)(_as_it_is)
for _container in (list, set, frozenset):
    DataCopier.register(_container)(_copy_items)
DataCopier.register(np.ndarray)(_copy_array)
DataCopier.register(dict)(_copy_dict)
DataCopier.register(tuple)(_copy_tuple)
DataCopier.register(torch.Tensor)(_copy_tensor)
