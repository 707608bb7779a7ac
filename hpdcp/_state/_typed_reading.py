"""Typed JSON back into values; runs no code that the JSON names, unless it may import modules."""

from __future__ import annotations

import binascii
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Final, NoReturn, cast

import numpy as np
import torch

from hpdcp._state._array_data import Array, describe, described
from hpdcp._state._classes import MissingClassError, find_class, is_namedtuple
from hpdcp._state._typed_records import RECORDS, known_dtype, only


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

    def data(self, ref: object) -> bytes | memoryview:
        if isinstance(ref, str):
            return binascii.a2b_base64(ref, strict_mode=True)
        if type(ref) is not int or not 0 <= ref < len(self.attachments):
            raise ValueError(f"there is no attachment {ref!r}")
        return self.attachments[ref]

    def array(self, ref: object, descr: object, shape: Sequence[int], order: str) -> Array:
        dtype = described(descr)
        describe(dtype)
        data, count = self.data(ref), prod(shape)
        if min(shape, default=0) < 0 or count * dtype.itemsize != len(data) or order not in ("C", "F"):
            raise ValueError(f"{len(data)} bytes do not make {shape} of {dtype}")
        # frombuffer refuses an empty buffer.
        flat = np.frombuffer(data, dtype) if count else np.empty(0, dtype)
        return flat.reshape(shape, order=order).copy(order=order)  # type: ignore[call-overload, no-any-return]

    def tensor(
        self, ref: object, named: str, shape: Sequence[int], requires_grad: bool, is_parameter: bool
    ) -> torch.Tensor:
        dtype = known_dtype(named)
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
        "$set": set,
        "$frozenset": frozenset,
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
