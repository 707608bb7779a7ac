"""Where, in an item of torch.distributed.checkpoint, the elements of a tensor lie.

An item is a whole file of `torch.save`: a zip archive whose records are not compressed. Its first record, `data.pkl`,
says of which dtype, shape and strides the tensor is, and the record `data/0` is its elements, which begin within the
first few KiB. From there on rows are read like those of any file. What is not simply the elements row after row (other
strides, another order of bytes, a wrapper) is left to torch, which reads the item whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hpdcp._files._torch_pickle import Name, PickleError, Record, Vocabulary, read_pickle
from hpdcp._format.signatures import ZIP
from hpdcp._state.dtypes import find_dtype

FIRST_BYTES: Final = 2 << 10
"""What is read of an item at first: the elements begin near byte 700, as torch writes it by default."""
MORE_BYTES: Final = 64 << 10
"""Where records are aligned to pages (`torch.serialization.config`)."""

_HEADER_BYTES: Final = 30
"""Of a record, before its name."""
_AFTER_PICKLE: Final = b".PK\x07\x08"
_REBUILD: Final = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
"""What makes a tensor, and of how many arguments: with more, the tensor is conjugated, negated, or of another class."""
_UNTYPED: Final = "torch.storage.UntypedStorage"
_STORAGES: Final = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool, "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
}  # fmt: skip


class NoItemError(ValueError):
    """The bytes are no file of torch.save."""


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a tensor, row after row."""

    offset: int
    """From the item's first byte."""
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _Described:
    """What `data.pkl` says."""

    storage: _Storage
    dtype: torch.dtype
    start: int
    """Element of the storage."""
    shape: tuple[int, ...]


class ItemReader:
    """Finds elements by the first bytes of items; remembers what descriptions say, as most are of a few kinds."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Described | None] = {}

    def find(self, head: memoryview, sizes: Sequence[int], length: int) -> Elements | None:
        """Where the elements of a chunk of `sizes` lie in an item of `length` bytes that begins with `head`.

        None where that cannot be told from these bytes, or the elements do not lie row after row.

        Raises:
            NoItemError: it is no item, or one of another tensor.
        """
        data = bytes(head)
        name, start = _record_at(data, 0)
        if not name.endswith(b"/data.pkl"):
            raise NoItemError("it does not begin as a file of torch.save does")
        folder = name[: -len(b"data.pkl")]
        described = self._described(data, start)
        if described is None:
            return None
        if described.shape != tuple(sizes):
            raise NoItemError(f"it holds a tensor of shape {list(described.shape)}, recorded is {list(sizes)}")
        if b"big" in _content(data, folder + b"byteorder", 3):
            return None
        begin = _start_of(data, folder + b"data/" + described.storage.key.encode())
        if begin is None:
            return None
        itemsize = described.dtype.itemsize
        count = described.storage.count if described.storage.kind == _UNTYPED else described.storage.count * itemsize
        nbytes = math.prod(sizes) * itemsize
        offset = described.start * itemsize
        if offset + nbytes > count or begin + count > length:
            raise NoItemError(f"its storage of {count} bytes does not hold {nbytes}, or reaches beyond it")
        return Elements(begin + offset, nbytes, described.dtype)

    def _described(self, data: bytes, start: int) -> _Described | None:
        end = data.find(_AFTER_PICKLE, start)
        key = data[start : end + 1]
        if end < 0 or key not in self._known:
            found = _described(data[start:] if end < 0 else key)
            if end < 0:
                return found
            self._known[key] = found
        return self._known[key]


def is_zip(head: bytes | memoryview) -> bool:
    """Whether an item begins so as torch.save writes."""
    return bytes(head[: len(ZIP)]) == ZIP


def _record_at(data: bytes, at: int) -> tuple[bytes, int]:
    """The name of the record whose header is at a position, and where its content begins."""
    header = data[at : at + _HEADER_BYTES]
    if len(header) < _HEADER_BYTES or not is_zip(header):
        raise NoItemError("it does not begin as a file of torch.save does")
    if header[8:10] != b"\0\0":
        raise NoItemError("it has a record that is compressed, which torch.save does not write")
    name_length, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    name = data[at + _HEADER_BYTES : at + _HEADER_BYTES + name_length]
    return name, at + _HEADER_BYTES + name_length + extra


def _start_of(data: bytes, name: bytes) -> int | None:
    """Where the content of the record of that name begins; None where its header is not in the data."""
    at = data.find(name)
    while at >= 0:
        header = at - _HEADER_BYTES
        if header > 0 and is_zip(data[header : header + len(ZIP)]):
            found, start = _record_at(data, header)
            if found == name:
                return start
        at = data.find(name, at + 1)
    return None


def _content(data: bytes, name: bytes, length: int) -> bytes:
    """The first bytes of a record; empty where it is not in the data."""
    start = _start_of(data, name)
    return b"" if start is None else data[start : start + length]


def _described(pickled: bytes) -> _Described | None:
    try:
        made, _ = read_pickle(pickled, _VOCABULARY)
    except PickleError:
        return None
    count = _REBUILD.get(made.name) if isinstance(made, Record) else None
    arguments = made.arguments if isinstance(made, Record) else ()
    if count is None or len(arguments) != count:
        return None
    storage, start, shape, strides = arguments[:4]
    dtype = _dtype_of(arguments, storage)
    counts = (start, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (None,)
    if dtype is None or any(type(each) is not int or each < 0 for each in counts) or len(shape) != len(strides):
        return None
    return _Described(storage, dtype, start, shape) if _is_row_major(shape, strides) else None


def _dtype_of(arguments: tuple[Any, ...], storage: Any) -> torch.dtype | None:
    if not isinstance(storage, _Storage):
        return None
    if storage.kind != _UNTYPED:
        return _STORAGES.get(storage.kind)
    named = arguments[6] if len(arguments) > 6 else None
    return find_dtype(named.text.removeprefix("torch.")) if isinstance(named, Name) else None


def _is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected and 0 not in shape:
            return False
        expected *= size
    return True


def _stored(reference: Any) -> _Storage:
    """What a reference to a storage says: ("storage", class, record, device, number of elements)."""
    if isinstance(reference, tuple) and len(reference) == 5:
        _, kind, key, _, count = reference
        if isinstance(kind, Name) and type(key) is str and type(count) is int and 0 <= count < 1 << 60:
            return _Storage(kind.text, key, count)
    raise PickleError("it refers to a storage in a way that torch.save does not")


def _known(module: str, name: str) -> str | None:
    text = f"{module}.{name}"
    is_dtype = module == "torch" and find_dtype(name) is not None
    return text if is_dtype or text in _STORAGES or text in _REBUILD or text in (_UNTYPED, _ORDERED) else None


_ORDERED: Final = "collections.OrderedDict"
_VOCABULARY: Final = Vocabulary(_known, {_ORDERED: lambda _: {}}, _stored)
