"""Types that are a list of simpler values: how each is taken apart, and put together again."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID, SafeUUID

import numpy as np
import torch

from hpdcp._state._array_data import NotTypedError
from hpdcp._state.dtypes import dtype_name, find_dtype


@dataclass(frozen=True, slots=True)
class Record:
    """A type that is a list of simpler values."""

    tag: str
    take_apart: Callable[[Any], Sequence[object]]
    put_together: Callable[[list[Any]], object]


def known_dtype(name: str) -> torch.dtype:
    """The dtype of that name; ValueError for another name, since what names it is damaged."""
    found = find_dtype(name)
    if found is None:
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def _take_timezone(value: timezone) -> list[object]:
    offset, name = value.utcoffset(None), value.tzname(None)
    return [offset] if timezone(offset).tzname(None) == name else [offset, name]


def _take_ordered(value: OrderedDict[object, object]) -> list[object]:
    # torch puts `_metadata` on the state dicts of modules.
    return [_pairs(value), dict(vars(value))]


def _put_ordered(parts: list[Any]) -> OrderedDict[object, object]:
    pairs, attributes = parts
    ordered = OrderedDict(pairs)
    if any(hasattr(OrderedDict, name) for name in attributes):
        raise ValueError("an attribute would hide one of OrderedDict's own")
    vars(ordered).update(attributes)
    return ordered


def _take_default(value: defaultdict[object, object]) -> list[object]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(name) is not factory:
        raise NotTypedError(f"defaultdict of {factory!r}")
    return [name, _pairs(value)]


def _pairs(value: Mapping[Any, object]) -> list[list[object]]:
    return [[key, item] for key, item in value.items()]


def only(kind: type, parts: list[Any]) -> Any:
    """The one part, which must be a `kind`: a constructor may take other things, and take them otherwise."""
    (part,) = parts
    if type(part) is not kind:
        raise ValueError(f"expected a {kind.__name__}, found {type(part).__name__}")
    return part


_FACTORIES: Final[Mapping[str | None, Callable[[], object] | None]] = MappingProxyType(
    {None: None}
    | {
        kind.__name__: kind
        for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, Counter)
    }
)

RECORDS: Final[Mapping[type, Record]] = MappingProxyType(
    {
        tuple: Record("tuple", list, tuple),
        dict: Record("dict", _pairs, dict),
        OrderedDict: Record("OrderedDict", _take_ordered, _put_ordered),
        defaultdict: Record("defaultdict", _take_default, lambda p: defaultdict(_FACTORIES[p[0]], p[1])),
        Counter: Record("Counter", _pairs, lambda p: Counter(dict(p))),
        deque: Record("deque", lambda v: [list(v), v.maxlen], lambda p: deque(p[0], p[1])),
        bytearray: Record("bytearray", lambda v: [bytes(v)], lambda p: bytearray(only(bytes, p))),
        complex: Record("complex", lambda v: [v.real, v.imag], lambda p: complex(*p)),
        range: Record("range", lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
        slice: Record("slice", lambda v: [v.start, v.stop, v.step], lambda p: slice(*p)),
        datetime: Record(
            "datetime",
            lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold],
            lambda p: datetime(*p[:8], fold=p[8]),
        ),
        date: Record("date", lambda v: [v.year, v.month, v.day], lambda p: date(*p)),
        time: Record(
            "time",
            lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold],
            lambda p: time(*p[:5], fold=p[5]),
        ),
        timedelta: Record("timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda p: timedelta(*p)),
        timezone: Record("timezone", _take_timezone, lambda p: timezone(*p)),
        PosixPath: Record("PosixPath", lambda v: [str(v)], lambda p: PosixPath(only(str, p))),
        WindowsPath: Record("WindowsPath", lambda v: [str(v)], lambda p: WindowsPath(only(str, p))),
        PurePosixPath: Record("PurePosixPath", lambda v: [str(v)], lambda p: PurePosixPath(only(str, p))),
        PureWindowsPath: Record("PureWindowsPath", lambda v: [str(v)], lambda p: PureWindowsPath(only(str, p))),
        UUID: Record("UUID", lambda v: [v.hex, v.is_safe.value], lambda p: UUID(p[0], is_safe=SafeUUID(p[1]))),
        Decimal: Record("Decimal", lambda v: [str(v)], lambda p: Decimal(only(str, p))),
        Fraction: Record("Fraction", lambda v: [v.numerator, v.denominator], lambda p: Fraction(*p)),
        # Not item(), which drops NULs at the end.
        np.str_: Record("numpy.str", lambda v: [str.__getitem__(v, slice(None))], lambda p: np.str_(only(str, p))),
        np.bytes_: Record(
            "numpy.bytes", lambda v: [bytes.__getitem__(v, slice(None))], lambda p: np.bytes_(only(bytes, p))
        ),
        torch.Size: Record("torch.Size", list, torch.Size),
        torch.dtype: Record("torch.dtype", lambda v: [dtype_name(v)], lambda p: known_dtype(only(str, p))),
        torch.device: Record("torch.device", lambda v: [str(v)], lambda p: torch.device(only(str, p))),
    }
)
