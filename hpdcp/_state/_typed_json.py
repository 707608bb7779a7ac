"""Python values as JSON that remembers their types.

A list, a dict of ordinary str keys, and None, bool, int, float and str are themselves. Everything else is an object
with one key, `"$"` and the name of its kind, and a list of what it is made of:

    (1, {2})            {"$tuple": [1, {"$set": [2]}]}
    {3: "x"}            {"$dict": [[3, "x"]]}
    float("nan")        {"$float": ["7ff8000000000000"]}
    numpy.zeros(4)      {"$array": [0, "<f8", {"$tuple": [4]}, "C"]}     its bytes are attachment 0, beside the JSON

Only exact types are taken: a subclass of dict or int is never turned into its base. The same value always gives the
same JSON (sets are sorted by their elements' JSON), because replicas are compared by checksum. That one list is held
twice is not recorded: it comes back as two equal ones.

Reading runs no code from the JSON: classes (of enum members and named tuples) are looked up in modules that are
already imported, through their dictionaries, so that not even a module's `__getattr__` runs.
"""

from __future__ import annotations

import binascii
import json
import struct
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from typing import Final, TypeAlias, cast

import numpy as np
import torch

from hpdcp._devices.memory import memory_range
from hpdcp._format.dtypes import SAFETENSORS_NAMES
from hpdcp._state._array_data import Array, NotTypedError, array_bytes, describe, described
from hpdcp._state._classes import class_name, is_namedtuple, is_reachable
from hpdcp._state._typed_records import RECORDS
from hpdcp._state.dtypes import dtype_name

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_DEPTH: Final = 200
"""Deepest nesting that is written: what is written can be read within Python's recursion limit of 1000."""

_INLINE_BYTES: Final = 256
"""Longest bytes value kept inside the JSON, as base64, when there are attachments."""

_JSON_INT: Final = (1 << 63) - 1
"""Beyond it an int is written as hex: other readers have 64 bits, and Python parses at most 4300 decimal digits."""


class TooDeepError(Exception):
    """Nesting beyond `MAX_DEPTH`; usually a container that contains itself."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Bytes that belong beside the JSON, and what they are to a reader that does not know it."""

    dtype_name: str
    """safetensors' name."""
    shape: tuple[int, ...]
    data: bytes


class HiddenTensorError(Exception):
    """A tensor inside a value that must not have one."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns values into JSON; arrays and long bytes become `attachments`, or base64 in the JSON when that is None."""

    attachments: list[Attachment] | None = field(default_factory=list)
    tensors: bool = True
    """Whether there may be tensors inside; else HiddenTensorError."""

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
            # Without attachments: the number of one would depend on the order the set happens to have in this process.
            inline = Encoder(None, self.tensors)
            return {f"${kind.__name__}": sorted((inline.encode(item, depth) for item in value), key=dumps)}
        record = RECORDS.get(kind)
        if record is not None:
            return {f"${record.tag}": [self.encode(item, depth) for item in record.take_apart(value)]}
        return self._by_class(value, depth)

    def _by_class(self, value: object, depth: int) -> Json:
        kind = type(value)
        if isinstance(value, bytes) and kind is bytes:
            small = self.attachments is None or len(value) <= _INLINE_BYTES
            return {"$bytes": [_base64(value) if small else self._keep("U8", (len(value),), value)]}
        if isinstance(value, np.ndarray) and kind is np.ndarray:
            return self._array(value, depth)
        if isinstance(value, np.generic):
            descr = describe(value.dtype)
            if described(descr).type is not kind:
                # C's long and long long are one dtype, and two classes of scalars.
                raise NotTypedError(class_name(kind))
            return {"$scalar": [self.encode(descr, depth), _base64(array_bytes(np.asarray(value), "C"))]}
        if isinstance(value, torch.Tensor) and not self.tensors:
            raise HiddenTensorError
        if isinstance(value, torch.Tensor) and kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value, depth)
        if isinstance(value, Enum) and type(value).__members__.get(value.name) is value and is_reachable(kind):
            return {"$enum": [class_name(kind), value.name]}
        if isinstance(value, tuple) and is_namedtuple(kind) and is_reachable(kind):
            fields: list[Json] = [*vars(kind)["_fields"]]
            return {"$namedtuple": [class_name(kind), fields, [self.encode(item, depth) for item in value]]}
        raise NotTypedError(class_name(kind))

    def _array(self, array: Array, depth: int) -> Json:
        descr = self.encode(describe(array.dtype), depth)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        name = SAFETENSORS_NAMES.get(array.dtype.name) if array.dtype.isnative and order == "C" else None
        data = array_bytes(array, order)
        ref = self._keep(name or "U8", array.shape if name else (len(data),), data)
        return {"$array": [ref, descr, list(array.shape), order]}

    def _tensor(self, tensor: torch.Tensor, depth: int) -> Json:
        strange = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or vars(tensor)
        if strange:
            raise NotTypedError(f"{class_name(type(tensor))} ({tensor.layout}, {tensor.dtype}, on {tensor.device})")
        memory_range(tensor)
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        name = SAFETENSORS_NAMES.get(dtype)
        ref = self._keep(name or "U8", shape if name else (len(data),), data)
        return {"$tensor": [ref, dtype, list(shape), tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)]}

    def _keep(self, stored_as: str, shape: tuple[int, ...], data: bytes) -> int | str:
        if self.attachments is None:
            return _base64(data)
        self.attachments.append(Attachment(stored_as, shape, data))
        return len(self.attachments) - 1


def dumps(tree: Json) -> str:
    """The shortest text of `tree`; str that UTF-8 can hold stay readable."""
    return _WRITER.encode(tree)


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


_WRITER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"))
