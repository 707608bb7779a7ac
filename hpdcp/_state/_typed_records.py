"""Types that are a list of simpler values: how each is taken apart, and put together again.

A constructor is called with parts of exactly the types that `take_apart` gives: many take other types as well, and do
with them what their size does not bound (a deque of a range, a fraction of the text "1e999999999").
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
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
    pairs, attributes = exactly(parts, list, dict)
    ordered: OrderedDict[object, object] = OrderedDict(known_pairs(pairs))
    if any(type(name) is not str or hasattr(OrderedDict, name) for name in attributes):
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


def _put_default(parts: list[Any]) -> defaultdict[object, object]:
    name, pairs = exactly(parts, (str, type(None)), list)
    return defaultdict(_FACTORIES[name], dict(known_pairs(pairs)))


def exactly(parts: list[Any], *kinds: type | tuple[type, ...]) -> list[Any]:
    """The parts, as many as `kinds` and each of exactly that type, or one of those; else ValueError."""
    if len(parts) != len(kinds):
        raise ValueError(f"{len(parts)} parts, expected {len(kinds)}")
    for part, kind in zip(parts, kinds, strict=True):
        if type(part) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise ValueError(f"found a {type(part).__name__} where none belongs")
    return parts


def only(kind: type, parts: list[Any]) -> Any:
    """The one part, which must be a `kind`."""
    return exactly(parts, kind)[0]


def known_pairs(pairs: list[Any]) -> list[Any]:
    """The pairs of keys and values, when they are such and their keys can be told apart quickly; else ValueError."""
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2:
            raise ValueError("an entry is no pair of a key and a value")
    distinct([pair[0] for pair in pairs])
    return pairs


def distinct(keys: list[Any]) -> list[Any]:
    """The keys of a dict or a set to be made; ValueError where many have one hash, which would take hours."""
    if len(keys) > _MOST_OF_ONE_HASH:
        hashes = np.sort(np.fromiter(map(hash, keys), np.int64, len(keys)))
        if bool((hashes[_MOST_OF_ONE_HASH:] == hashes[:-_MOST_OF_ONE_HASH]).any()):
            raise ValueError(f"more than {_MOST_OF_ONE_HASH} keys have one hash")
    return keys


def _put_slice(parts: list[Any]) -> slice:
    start, stop, step = parts
    return slice(start, stop, step)


def _take_buffer(value: BytesIO) -> list[object]:
    if value.closed:
        raise NotTypedError("closed io.BytesIO")
    data = value.getvalue()
    return [data, min(value.tell(), len(data))]


def _put_buffer(parts: list[Any]) -> BytesIO:
    data, position = exactly(parts, bytes, int)
    buffer = BytesIO(data)
    buffer.seek(min(position, len(data)))
    return buffer


def _put_uuid(parts: list[Any]) -> UUID:
    digits, safe = exactly(parts, str, (int, type(None)))
    return UUID(digits, is_safe=SafeUUID(safe))


def _sizes(parts: list[Any]) -> list[Any]:
    return exactly(parts, *(int,) * len(parts))


def _put_fraction(parts: list[Any]) -> Fraction:
    numerator, denominator = exactly(parts, int, int)
    if max(numerator.bit_length(), denominator.bit_length()) > _MOST_BITS:
        raise ValueError(f"a fraction of more than {_MOST_BITS} bits")
    return Fraction(numerator, denominator)


def _take_fraction(value: Fraction) -> list[object]:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise NotTypedError(f"fraction of more than {_MOST_BITS} bits")
    return [value.numerator, value.denominator]


_MOST_OF_ONE_HASH: Final = 1000
"""Keys of one hash are compared each with each."""
_MOST_BITS: Final = 1 << 18
"""Of a fraction's numbers: finding what two share takes time that grows with the square of their length, 0.1 s here."""
_NUMBER: Final = (int, float)
_ZONE: Final = (timezone, type(None))


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
        dict: Record("dict", _pairs, lambda p: dict(known_pairs(p))),
        OrderedDict: Record("OrderedDict", _take_ordered, _put_ordered),
        defaultdict: Record("defaultdict", _take_default, _put_default),
        Counter: Record("Counter", _pairs, lambda p: Counter(dict(known_pairs(p)))),
        deque: Record("deque", lambda v: [list(v), v.maxlen], lambda p: deque(*exactly(p, list, (int, type(None))))),
        bytearray: Record("bytearray", lambda v: [bytes(v)], lambda p: bytearray(only(bytes, p))),
        BytesIO: Record("BytesIO", _take_buffer, _put_buffer),
        complex: Record("complex", lambda v: [v.real, v.imag], lambda p: complex(*exactly(p, _NUMBER, _NUMBER))),
        range: Record("range", lambda v: [v.start, v.stop, v.step], lambda p: range(*exactly(p, int, int, int))),
        slice: Record("slice", lambda v: [v.start, v.stop, v.step], _put_slice),
        datetime: Record(
            "datetime",
            lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold],
            lambda p: datetime(*exactly(p, *(int,) * 7, _ZONE, int)[:8], fold=p[8]),
        ),
        date: Record("date", lambda v: [v.year, v.month, v.day], lambda p: date(*exactly(p, int, int, int))),
        time: Record(
            "time",
            lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold],
            lambda p: time(*exactly(p, *(int,) * 4, _ZONE, int)[:5], fold=p[5]),
        ),
        timedelta: Record(
            "timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda p: timedelta(*exactly(p, int, int, int))
        ),
        timezone: Record(
            "timezone", _take_timezone, lambda p: timezone(*exactly(p, timedelta, *(str,) * (len(p) - 1)))
        ),
        PosixPath: Record("PosixPath", lambda v: [str(v)], lambda p: PosixPath(only(str, p))),
        WindowsPath: Record("WindowsPath", lambda v: [str(v)], lambda p: WindowsPath(only(str, p))),
        PurePosixPath: Record("PurePosixPath", lambda v: [str(v)], lambda p: PurePosixPath(only(str, p))),
        PureWindowsPath: Record("PureWindowsPath", lambda v: [str(v)], lambda p: PureWindowsPath(only(str, p))),
        UUID: Record("UUID", lambda v: [v.hex, v.is_safe.value], _put_uuid),
        Decimal: Record("Decimal", lambda v: [str(v)], lambda p: Decimal(only(str, p))),
        Fraction: Record("Fraction", _take_fraction, _put_fraction),
        # Not item(), which drops NULs at the end.
        np.str_: Record("numpy.str", lambda v: [str.__getitem__(v, slice(None))], lambda p: np.str_(only(str, p))),
        np.bytes_: Record(
            "numpy.bytes", lambda v: [bytes.__getitem__(v, slice(None))], lambda p: np.bytes_(only(bytes, p))
        ),
        torch.Size: Record("torch.Size", list, lambda p: torch.Size(_sizes(p))),
        torch.dtype: Record("torch.dtype", lambda v: [dtype_name(v)], lambda p: known_dtype(only(str, p))),
        torch.device: Record("torch.device", lambda v: [str(v)], lambda p: torch.device(only(str, p))),
    }
)
