"""Looks at what a save left, and a store that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from hpdcp._base.backend import Backend, ByteRange, KeyInfo
from hpdcp._base.errors import StorageError
from hpdcp._files import registry
from hpdcp._format.metadata import Metadata


def open_place(place: str) -> Backend:
    """The backend there."""
    return registry.open_backend(registry.resolve_checkpoint_id(place))


def keys_of(place: str) -> list[str]:
    """Every key there."""
    with open_place(place) as backend:
        return [info.key for info in backend.list_keys(recursive=True)]


def first_file_of(metadata: Metadata, name: str) -> str:
    """The file that the first chunk of a tensor is in."""
    row = metadata.find(name)
    assert row is not None
    return metadata.storage_info(metadata.chunk_rows(row)[0]).key


class FailingBackend(Backend):
    """Another backend, on which the write after so many fails."""

    def __init__(self, real: Backend, calls: int) -> None:
        self._real = real
        self._left = calls
        self._lock = threading.Lock()
        self.name = real.name  # type: ignore[misc]
        self.remote = real.remote  # type: ignore[misc]
        self.url = real.url
        self.conditional_create = real.conditional_create

    def prepare(self) -> None:
        self._real.prepare()

    def list_keys(self, under: str = "", *, recursive: bool = False) -> list[KeyInfo]:
        return self._real.list_keys(under, recursive=recursive)

    def size(self, key: str) -> int:
        return self._real.size(key)

    def read(self, key: str) -> bytes:
        return self._real.read(key)

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        self._real.read_ranges(key, ranges, into)

    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                raise StorageError(f"cannot write {key!r}: the store is full.")
        self._real.write(key, buffers, size=size, exclusive=exclusive)

    def publish(self, key: str, data: bytes) -> None:
        self._real.publish(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        self._real.delete(keys)
