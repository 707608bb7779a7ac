"""Python values as JSON that remembers their types.

A list, a dict of ordinary str keys, and None, bool, int, float and str are themselves. Everything else is an object
with one key, `"$"` and the name of its kind, and a list of what it is made of:

    (1, {2})            {"$tuple": [1, {"$set": [2]}]}
    {3: "x"}            {"$dict": [[3, "x"]]}
    float("nan")        {"$float": ["7ff8000000000000"]}
    numpy.zeros(4)      {"$array": [0, "<f8", {"$tuple": [4]}, "C"]}     its bytes are part 0, beside the JSON

Only exact types are taken: a subclass of dict or int is never turned into its base. The same value always gives the
same JSON (sets are sorted by their elements' JSON), because replicas are compared by checksum. That one list is held
twice is not recorded: it comes back as two equal ones.

Reading runs no code from the JSON: classes (of enum members and named tuples) are looked up in modules that are
already imported, through their dictionaries, so that not even a module's `__getattr__` runs.
"""

from __future__ import annotations

import binascii
import importlib
import json
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from math import isfinite, prod
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import MappingProxyType, ModuleType
from typing import Any, Final, NoReturn, TypeAlias, cast
from uuid import UUID, SafeUUID

import numpy as np
import numpy.typing as npt
import torch

from hpdcp._format.dtypes import SAFETENSORS_NAMES
from hpdcp._state.dtypes import dtype_name, find_dtype

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Array: TypeAlias = npt.NDArray[Any]

MAX_DEPTH: Final = 200
"""Deepest nesting that is written: what is written can be read within Python's recursion limit of 1000."""

_INLINE_BYTES: Final = 256
"""Longest bytes value kept inside the JSON, as base64, when there are parts beside it."""

_JSON_INT: Final = (1 << 63) - 1
"""Beyond it an int is written as hex: other readers have 64 bits, and Python parses at most 4300 decimal digits."""


class NotTypedError(Exception):
    """A value outside the types listed here; carries the name of its class."""


class TooDeepError(Exception):
    """Nesting beyond `MAX_DEPTH`; usually a container that contains itself."""


class MissingClassError(Exception):
    """JSON names a class whose module is not imported, or no longer has it; carries the name and the reason."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that belong beside the JSON, and what they are to a reader that does not know it."""

    dtype_name: str
    """safetensors' name."""
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns values into JSON; arrays and long bytes become `parts`, or base64 inside the JSON when that is None."""

    parts: list[Part] | None = field(default_factory=list)

    def encode(self, value: object, depth: int = 0) -> Json:
        """The JSON of `value`; NotTypedError when it holds a type not listed here, TooDeepError when it never ends."""
        kind = type(value)
        if value is None or kind is bool:
            return cast("bool | None", value)
        if isinstance(value, int) and kind is int:
            return value if -_JSON_INT <= value <= _JSON_INT else {"$int": [hex(value)]}
        if isinstance(value, float) and kind is float:
            return value if isfinite(value) else {"$float": [struct.pack(">d", value).hex()]}
        if isinstance(value, str) and kind is str:
            return value if _is_text(value) else {"$str": [_base64(value.encode("utf-8", "surrogatepass"))]}
        if depth >= MAX_DEPTH:
            raise TooDeepError
        depth += 1
        if isinstance(value, list) and kind is list:
            return [self.encode(item, depth) for item in value]
        if isinstance(value, dict) and kind is dict and all(_is_plain_key(key) for key in value):
            return {key: self.encode(item, depth) for key, item in value.items()}
        if isinstance(value, (set, frozenset)) and kind in (set, frozenset):
            # Without parts: a part's number would depend on the order the set happens to have in this process.
            inline = Encoder(None)
            return {f"${kind.__name__}": sorted((inline.encode(item, depth) for item in value), key=dumps)}
        record = _RECORDS.get(kind)
        if record is not None:
            return {f"${record.tag}": [self.encode(item, depth) for item in record.take_apart(value)]}
        return self._by_class(value, depth)

    def _by_class(self, value: object, depth: int) -> Json:
        kind = type(value)
        if isinstance(value, bytes) and kind is bytes:
            small = self.parts is None or len(value) <= _INLINE_BYTES
            return {"$bytes": [_base64(value) if small else self._keep("U8", (len(value),), value)]}
        if isinstance(value, np.ndarray) and kind is np.ndarray:
            return self._array(value, depth)
        if isinstance(value, np.generic):
            descr = _describe(value.dtype)
            if _described(descr).type is not kind:
                # C's long and long long are one dtype, and two classes of scalars.
                raise NotTypedError(class_name(kind))
            return {"$scalar": [self.encode(descr, depth), _base64(_array_bytes(np.asarray(value), "C"))]}
        if isinstance(value, torch.Tensor) and kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value, depth)
        if isinstance(value, Enum) and type(value).__members__.get(value.name) is value and _is_reachable(kind):
            return {"$enum": [class_name(kind), value.name]}
        if isinstance(value, tuple) and is_namedtuple(kind) and _is_reachable(kind):
            fields: list[Json] = [*vars(kind)["_fields"]]
            return {"$namedtuple": [class_name(kind), fields, [self.encode(item, depth) for item in value]]}
        raise NotTypedError(class_name(kind))

    def _array(self, array: Array, depth: int) -> Json:
        descr = self.encode(_describe(array.dtype), depth)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        name = SAFETENSORS_NAMES.get(array.dtype.name) if array.dtype.isnative and order == "C" else None
        data = _array_bytes(array, order)
        ref = self._keep(name or "U8", array.shape if name else (len(data),), data)
        return {"$array": [ref, descr, list(array.shape), order]}

    def _tensor(self, tensor: torch.Tensor, depth: int) -> Json:
        strange = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or vars(tensor)
        if strange:
            raise NotTypedError(f"{class_name(type(tensor))} ({tensor.layout}, {tensor.dtype}, on {tensor.device})")
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        name = SAFETENSORS_NAMES.get(dtype)
        ref = self._keep(name or "U8", shape if name else (len(data),), data)
        return {"$tensor": [ref, dtype, list(shape), tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)]}

    def _keep(self, stored_as: str, shape: tuple[int, ...], data: bytes) -> int | str:
        if self.parts is None:
            return _base64(data)
        self.parts.append(Part(stored_as, shape, data))
        return len(self.parts) - 1


def dumps(tree: Json) -> str:
    """The shortest text of `tree`; str that UTF-8 can hold stay readable."""
    return _WRITER.encode(tree)


def loads(text: str, parts: Sequence[memoryview] = (), *, import_classes: bool = False) -> Any:
    """The value that `text` is the JSON of.

    `import_classes` imports the modules of enum members and named tuples, which runs them; without it such a module
    must be imported already, else MissingClassError. Any other failure means that `text` is not what `dumps` wrote,
    and is whatever exception that led to: the caller says whose text it was.
    """
    if not parts and not import_classes:
        return _READER.decode(text)
    return _reader(_Beside(parts, import_classes)).decode(text)


def find_class(name: str, *, import_module: bool = False) -> type:
    """The class called `module:qualified.name`, without running code unless `import_module`; else MissingClassError."""
    module_name, _, path = name.partition(":")
    if import_module and module_name not in sys.modules:
        try:
            importlib.import_module(module_name)
        except Exception as error:  # importing a module may fail in any way at all
            raise MissingClassError(f"{name}, whose module cannot be imported ({error!r})") from error
    module = sys.modules.get(module_name)
    if not isinstance(module, ModuleType):
        raise MissingClassError(f"{name}, whose module is not imported: import {module_name} before loading")
    found: object = module
    for part in path.split("."):
        found = vars(found).get(part) if found is module or isinstance(found, type) else None
    if not isinstance(found, type):
        raise MissingClassError(f"{name}, which module {module_name} does not have here")
    return found


def is_namedtuple(kind: type) -> bool:
    """Whether `kind` is a named tuple and nothing more: made by `namedtuple` or `NamedTuple`, not derived from one."""
    return kind.__bases__ == (tuple,) and isinstance(vars(kind).get("_fields"), tuple)


def class_name(kind: type) -> str:
    """`module:qualified.name`, by which `find_class` finds it where it can be found at all."""
    return f"{kind.__module__}:{kind.__qualname__}"


@dataclass(frozen=True, slots=True)
class _Record:
    """A type that is a list of simpler values."""

    tag: str
    take_apart: Callable[[Any], Sequence[object]]
    put_together: Callable[[list[Any]], object]


@dataclass(frozen=True, slots=True)
class _Beside:
    """What lies beside the JSON while it is read."""

    parts: Sequence[memoryview] = ()
    import_classes: bool = False

    def data(self, ref: object) -> bytes | memoryview:
        if isinstance(ref, str):
            return binascii.a2b_base64(ref, strict_mode=True)
        if type(ref) is not int or not 0 <= ref < len(self.parts):
            raise ValueError(f"there is no part {ref!r}")
        return self.parts[ref]

    def array(self, ref: object, descr: object, shape: Sequence[int], order: str) -> Array:
        dtype = _described(descr)
        _describe(dtype)
        data, count = self.data(ref), prod(shape)
        if min(shape, default=0) < 0 or count * dtype.itemsize != len(data) or order not in ("C", "F"):
            raise ValueError(f"{len(data)} bytes do not make {shape} of {dtype}")
        # frombuffer refuses an empty buffer.
        flat = np.frombuffer(data, dtype) if count else np.empty(0, dtype)
        return flat.reshape(shape, order=order).copy(order=order)  # type: ignore[call-overload, no-any-return]

    def tensor(
        self, ref: object, named: str, shape: Sequence[int], requires_grad: bool, is_parameter: bool
    ) -> torch.Tensor:
        dtype = _dtype_of(named)
        data, count = self.data(ref), prod(shape)
        if min(shape, default=0) < 0 or count * dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes do not make {shape} of {dtype}")
        if count:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(tuple(shape))
        else:
            tensor = torch.empty(tuple(shape), dtype=dtype)
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=bool(requires_grad))
        return tensor.requires_grad_(bool(requires_grad))

    def enum(self, name: str, member: str) -> Enum:
        found = find_class(name, import_module=self.import_classes)
        if not issubclass(found, Enum) or member not in found.__members__:
            raise MissingClassError(f"{name}.{member}, which is not an enum member here")
        return found.__members__[member]

    def namedtuple(self, name: str, fields: list[str], values: list[object]) -> tuple[object, ...]:
        found = find_class(name, import_module=self.import_classes)
        if not is_namedtuple(found) or vars(found)["_fields"] != tuple(fields):
            raise MissingClassError(f"{name} with the fields {fields}, which is not what it has here")
        if len(values) != len(fields):
            raise ValueError(f"{len(values)} values for the fields {fields}")
        # Not found(*values): a class may do anything when called.
        return cast("tuple[object, ...]", tuple.__new__(found, values))


def _revive(beside: _Beside, table: dict[str, Any]) -> Any:
    """What one JSON object stands for; called innermost first, so that its contents are values already."""
    if len(table) != 1:
        return table
    ((key, payload),) = table.items()
    if not key.startswith("$"):
        return table
    if not isinstance(payload, list):
        raise TypeError(f"{key} is not followed by a list")
    put_together = _SIMPLE.get(key)
    if put_together is not None:
        return put_together(payload)
    with_parts = _WITH_PARTS.get(key)
    if with_parts is None:
        raise ValueError(f"there is no kind {key!r} (written by a newer hpdcp, or damaged)")
    return with_parts(beside, *payload)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _reader(beside: _Beside) -> json.JSONDecoder:
    return json.JSONDecoder(object_hook=partial(_revive, beside), parse_constant=_refuse_constant)


def _is_text(value: str) -> bool:
    """Whether UTF-8 can hold it: a lone surrogate cannot be told from half of a pair once it is escaped."""
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_plain_key(key: object) -> bool:
    return isinstance(key, str) and type(key) is str and not key.startswith("$") and _is_text(key)


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _is_reachable(kind: type) -> bool:
    try:
        return find_class(class_name(kind)) is kind
    except MissingClassError:
        return False


def _dtype_of(name: str) -> torch.dtype:
    found = find_dtype(name)
    if found is None:
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def _describe(dtype: np.dtype[Any]) -> object:
    """numpy's own description of `dtype`, which gives it back; NotTypedError where none does."""
    if dtype.metadata is None and _is_data(dtype):
        descr: object = np.lib.format.dtype_to_descr(dtype)
        if _described(descr) == dtype:
            return descr
    raise NotTypedError(f"numpy array of {dtype}")


def _described(descr: Any) -> np.dtype[Any]:
    return np.lib.format.descr_to_dtype(descr)


def _is_data(dtype: np.dtype[Any]) -> bool:
    """Whether its elements are nothing but their bytes on every machine: no objects, foreign types or long doubles."""
    if dtype.subdtype is not None:
        return _is_data(dtype.base)
    if dtype.fields is not None:
        return dtype.type is np.void and dtype.itemsize > 0 and all(_is_data(item[0]) for item in dtype.fields.values())
    if dtype.kind in "SUV":
        return dtype.itemsize > 0 and dtype.isbuiltin != 2 and dtype.type in (np.bytes_, np.str_, np.void)
    return dtype.kind in "biufcmM" and dtype.isbuiltin != 2 and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def _array_bytes(array: Array, order: str) -> bytes:
    if array.dtype.fields is not None:
        # The padding between fields is whatever was in memory, and would differ between two ranks' equal values.
        clean = np.zeros(array.shape, array.dtype)
        _copy_fields(array, clean)
        array = clean
    return array.tobytes(order="F" if order == "F" else "C")


def _copy_fields(source: Array, target: Array) -> None:
    for name in source.dtype.names or ():
        if target[name].dtype.fields is not None:
            _copy_fields(source[name], target[name])
        else:
            target[name][...] = source[name]


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


def _only(kind: type, parts: list[Any]) -> Any:
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

_RECORDS: Final[Mapping[type, _Record]] = MappingProxyType(
    {
        tuple: _Record("tuple", list, tuple),
        dict: _Record("dict", _pairs, dict),
        OrderedDict: _Record("OrderedDict", _take_ordered, _put_ordered),
        defaultdict: _Record("defaultdict", _take_default, lambda p: defaultdict(_FACTORIES[p[0]], p[1])),
        Counter: _Record("Counter", _pairs, lambda p: Counter(dict(p))),
        deque: _Record("deque", lambda v: [list(v), v.maxlen], lambda p: deque(p[0], p[1])),
        bytearray: _Record("bytearray", lambda v: [bytes(v)], lambda p: bytearray(_only(bytes, p))),
        complex: _Record("complex", lambda v: [v.real, v.imag], lambda p: complex(*p)),
        range: _Record("range", lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
        slice: _Record("slice", lambda v: [v.start, v.stop, v.step], lambda p: slice(*p)),
        datetime: _Record(
            "datetime",
            lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold],
            lambda p: datetime(*p[:8], fold=p[8]),
        ),
        date: _Record("date", lambda v: [v.year, v.month, v.day], lambda p: date(*p)),
        time: _Record(
            "time",
            lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold],
            lambda p: time(*p[:5], fold=p[5]),
        ),
        timedelta: _Record("timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda p: timedelta(*p)),
        timezone: _Record("timezone", _take_timezone, lambda p: timezone(*p)),
        PosixPath: _Record("PosixPath", lambda v: [str(v)], lambda p: PosixPath(_only(str, p))),
        WindowsPath: _Record("WindowsPath", lambda v: [str(v)], lambda p: WindowsPath(_only(str, p))),
        PurePosixPath: _Record("PurePosixPath", lambda v: [str(v)], lambda p: PurePosixPath(_only(str, p))),
        PureWindowsPath: _Record("PureWindowsPath", lambda v: [str(v)], lambda p: PureWindowsPath(_only(str, p))),
        UUID: _Record("UUID", lambda v: [v.hex, v.is_safe.value], lambda p: UUID(p[0], is_safe=SafeUUID(p[1]))),
        Decimal: _Record("Decimal", lambda v: [str(v)], lambda p: Decimal(_only(str, p))),
        Fraction: _Record("Fraction", lambda v: [v.numerator, v.denominator], lambda p: Fraction(*p)),
        # Not item(), which drops NULs at the end.
        np.str_: _Record("numpy.str", lambda v: [str.__getitem__(v, slice(None))], lambda p: np.str_(_only(str, p))),
        np.bytes_: _Record(
            "numpy.bytes", lambda v: [bytes.__getitem__(v, slice(None))], lambda p: np.bytes_(_only(bytes, p))
        ),
        torch.Size: _Record("torch.Size", list, torch.Size),
        torch.dtype: _Record("torch.dtype", lambda v: [dtype_name(v)], lambda p: _dtype_of(_only(str, p))),
        torch.device: _Record("torch.device", lambda v: [str(v)], lambda p: torch.device(_only(str, p))),
    }
)

_SIMPLE: Final[Mapping[str, Callable[[list[Any]], object]]] = MappingProxyType(
    {
        "$int": lambda p: int(_only(str, p), 16),
        "$float": lambda p: struct.unpack(">d", bytes.fromhex(_only(str, p)))[0],
        "$str": lambda p: binascii.a2b_base64(_only(str, p), strict_mode=True).decode("utf-8", "surrogatepass"),
        "$set": set,
        "$frozenset": frozenset,
    }
    | {f"${record.tag}": record.put_together for record in _RECORDS.values()}
)

_WITH_PARTS: Final[Mapping[str, Callable[..., object]]] = MappingProxyType(
    {
        "$bytes": lambda beside, ref: bytes(beside.data(ref)),
        "$array": _Beside.array,
        "$scalar": lambda beside, descr, ref: beside.array(ref, descr, (), "C")[()],
        "$tensor": _Beside.tensor,
        "$enum": _Beside.enum,
        "$namedtuple": _Beside.namedtuple,
    }
)

_WRITER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"))
_READER: Final = _reader(_Beside())
