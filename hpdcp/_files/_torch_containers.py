"""Tensors that torch's FileSystemWriter stored with `SerializationFormat.SAFETENSORS`.

All tensors of a file then lie in one container of safetensors, behind the file's Python values. `.metadata` says of
each of them only where the container begins; its header says the rest, and where each begins in the whole tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._files._torch_items import Elements, NoItemError
from hpdcp._format.container import PREFIX_BYTES, StoredEntry, header_length, parse_header
from hpdcp._format.dtypes import TORCH_NAMES
from hpdcp._state.dtypes import find_dtype

_SHARDING_INFO: Final = "DCP_SHARDING_INFO"
_SAVED_OFFSETS: Final = "saved_offsets"

_Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Container:
    entries: Mapping[str, StoredEntry]
    begins: Mapping[str, object]
    """Name → where it begins in the whole tensor, as torch says it."""


class Containers:
    """Finds tensors in such containers, the header of each of which is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], _Container] = {}

    def find(
        self, backend: Backend, key: str, file_size: int, at: int, chunk: tuple[str, _Size, _Size]
    ) -> Elements | None:
        """Where the elements of a chunk (its name, offsets and sizes) lie, counted from the start of the container.

        Raises:
            NoItemError: there is no container, or another tensor in it.
            StorageError: the store failed.
        """
        fqn, offsets, sizes = chunk
        if (key, at) not in self._known:
            self._known[key, at] = _read(backend, key, file_size, at)
        container = self._known[key, at]
        entry = container.entries.get(fqn)
        if entry is None or entry.shape != sizes:
            raise NoItemError("its container of safetensors holds no such tensor")
        if container.begins.get(fqn) != list(offsets):
            raise NoItemError(
                f"its container holds another box of it, at {container.begins.get(fqn)}: torch keeps only one of those "
                "that a rank saves in this format"
            )
        dtype = find_dtype(TORCH_NAMES.get(entry.dtype_name, ""))
        if dtype is None:
            raise NoItemError(f"it is of dtype {entry.dtype_name}, which torch does not have")
        return Elements(entry.offset, entry.nbytes, dtype)


def _read(backend: Backend, key: str, file_size: int, at: int) -> _Container:
    size = file_size - at
    if size < PREFIX_BYTES:
        raise NoItemError("it begins as no file of torch.save does")
    head = bytearray(PREFIX_BYTES)
    backend.read_ranges(key, [ByteRange(at, len(head))], [memoryview(head)])
    try:
        head = bytearray(header_length(head, size, where=repr(key)))
        backend.read_ranges(key, [ByteRange(at, len(head))], [memoryview(head)])
        header = parse_header(head, size, where=repr(key))
    except CorruptCheckpointError:
        raise NoItemError("it begins neither as a file of torch.save nor as one of safetensors") from None
    try:
        told = json.loads(header.metadata.get(_SHARDING_INFO, ""))
        begins = {name: about[_SAVED_OFFSETS] for name, about in told.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NoItemError(f"its container of safetensors has no sound table {_SHARDING_INFO}") from None
    return _Container({entry.key: entry for entry in header.entries}, begins)
