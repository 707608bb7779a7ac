"""Typed JSON back into values; runs no code that the JSON names, unless it may import modules.

What a value takes in memory is bounded by the length of its own encoding: parts have exactly the types that the encoder
gives them, shapes are multiplied out and compared with the bytes that are there before anything is made of them, and
an attachment belongs to one value.
"""

from __future__ import annotations

import binascii
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Final, NoReturn, cast

import numpy as np
import torch

from hpdcp._state._array_data import Array, describe, described
from hpdcp._state._classes import MissingClassError, find_class, is_namedtuple
from hpdcp._state._typed_records import RECORDS, distinct, exactly, known_dtype, only

_LARGEST_DIM: Final = (1 << 63) - 1
_MOST_DIMS: Final = 64
"""Of an array or a tensor: as many as numpy and torch have."""


def loads(text: str, attachments: Sequence[memoryview] = (), *, import_classes: bool = False) -> Any:
    """The value that `text` is the JSON of.

    `import_classes` imports the modules of enum members and named tuples, which runs them; without it such a module
    must be imported already, else MissingClassError. Any other failure means that `text` is not what `dumps` wrote,
    and is whatever exception that led to: the caller says whose text it was.
    """
    if not attachments and not import_classes:
        return _READER.decode(text)
    return _reader(_Beside(attachments, import_classes)).decode(text)


@dataclass(frozen=True, slots=True)
class _Beside:
    """What lies beside the JSON while it is read."""

    attachments: Sequence[memoryview] = ()
    import_classes: bool = False
    used: set[int] = field(default_factory=set)
    """Attachments that a value was made of."""

    def data(self, ref: object) -> bytes | memoryview:
        if isinstance(ref, str):
            return binascii.a2b_base64(ref, strict_mode=True)
        if type(ref) is not int or not 0 <= ref < len(self.attachments):
            raise ValueError(f"there is no attachment {ref!r}")
        if ref in self.used:
            raise ValueError(f"attachment {ref} belongs to two values")
        self.used.add(ref)
        return self.attachments[ref]

    def array(self, ref: object, descr: object, shape: object, order: str) -> Array:
        if not _is_description(descr):
            raise ValueError("that is no description of a dtype")
        dtype = described(descr)
        describe(dtype)
        data = self.data(ref)
        sizes = _shape_of(shape, dtype.itemsize, len(data))
        if order not in ("C", "F"):
            raise ValueError("there are two orders, C and F")
        # frombuffer refuses an empty buffer.
        flat = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
        return flat.reshape(sizes, order=order).copy(order=order)  # type: ignore[call-overload, no-any-return]

    def tensor(self, ref: object, named: str, shape: object, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
        dtype = known_dtype(*exactly([named], str))
        data = self.data(ref)
        sizes = _shape_of(shape, dtype.itemsize, len(data))
        if len(data):
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(sizes)
        else:
            tensor = torch.empty(sizes, dtype=dtype)
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=bool(requires_grad))
        return tensor.requires_grad_(bool(requires_grad))

    def enum(self, name: str, member: str) -> Enum:
        exactly([name, member], str, str)
        found = find_class(name, import_module=self.import_classes)
        if not issubclass(found, Enum) or member not in found.__members__:
            raise MissingClassError(f"{name}.{member}, which is not an enum member here")
        return found.__members__[member]

    def namedtuple(self, name: str, fields: list[str], values: list[object]) -> tuple[object, ...]:
        exactly([name, fields, values], str, list, list)
        found = find_class(name, import_module=self.import_classes)
        if not is_namedtuple(found) or vars(found)["_fields"] != tuple(fields):
            raise MissingClassError(f"{name} with the fields {fields}, which is not what it has here")
        if len(values) != len(fields):
            raise ValueError(f"{len(values)} values for the fields {fields}")
        # Not found(*values): a class may do anything when called.
        return cast("tuple[object, ...]", tuple.__new__(found, values))


def _is_description(descr: object) -> bool:
    """Whether it is made of what numpy describes dtypes with: anything else it might take apart without end."""
    if type(descr) in (list, tuple):
        return all(map(_is_description, cast("list[object]", descr)))
    return type(descr) in (str, int)


def _shape_of(shape: object, itemsize: int, nbytes: int) -> tuple[int, ...]:
    """The sizes, which must take so many bytes together; else ValueError."""
    if type(shape) not in (list, tuple):
        raise ValueError("a shape is a list of sizes")
    sizes = tuple(exactly(list(cast("list[object]", shape)), *(int,) * len(cast("list[object]", shape))))
    if min(sizes, default=0) < 0 or max(sizes, default=0) > _LARGEST_DIM or len(sizes) > _MOST_DIMS:
        raise ValueError("a size is negative or too large, or there are too many")
    if prod(sizes) * itemsize != nbytes:
        raise ValueError(f"{nbytes} bytes do not make a shape of {len(sizes)} dimensions of {itemsize} bytes each")
    return sizes


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
    with_attachments = _WITH_ATTACHMENTS.get(key)
    if with_attachments is None:
        raise ValueError(f"there is no kind {key!r} (written by a newer hpdcp, or damaged)")
    return with_attachments(beside, *payload)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _reader(beside: _Beside) -> json.JSONDecoder:
    return json.JSONDecoder(object_hook=partial(_revive, beside), parse_constant=_refuse_constant)


_SIMPLE: Final[Mapping[str, Callable[[list[Any]], object]]] = MappingProxyType(
    {
        "$int": lambda p: int(only(str, p), 16),
        "$float": lambda p: struct.unpack(">d", bytes.fromhex(only(str, p)))[0],
        "$str": lambda p: binascii.a2b_base64(only(str, p), strict_mode=True).decode("utf-8", "surrogatepass"),
        "$set": lambda p: set(distinct(p)),
        "$frozenset": lambda p: frozenset(distinct(p)),
    }
    | {f"${record.tag}": record.put_together for record in RECORDS.values()}
)

_WITH_ATTACHMENTS: Final[Mapping[str, Callable[..., object]]] = MappingProxyType(
    {
        "$bytes": lambda beside, ref: bytes(beside.data(ref)),
        "$array": _Beside.array,
        "$scalar": lambda beside, descr, ref: beside.array(ref, descr, (), "C")[()],
        "$tensor": _Beside.tensor,
        "$enum": _Beside.enum,
        "$namedtuple": _Beside.namedtuple,
    }
)

_READER: Final = _reader(_Beside())
