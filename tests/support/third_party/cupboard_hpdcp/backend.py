"""Checkpoints in one table of SQLite, as `cupboard:///folder/name`: written against the contract alone."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from hpdcp.backend import Backend, ByteRange, KeyInfo, as_bytes, checked_buffers, checked_key, truncated
from hpdcp.errors import (
    InvalidArgumentError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
)

TABLE = "CREATE TABLE IF NOT EXISTS things (path TEXT PRIMARY KEY, bytes BLOB NOT NULL, put REAL NOT NULL)"


class CupboardBackend(Backend):
    """Args:
    url: `cupboard://`, a folder, and a name; the file `cupboard.sqlite` in the folder holds all.
    storage_options: None are known, and none may be given, but `label`, which messages then show.
    patience: Seconds to wait for other writers.
    """

    name: ClassVar[str] = "cupboard"
    conditional_create = True
    write_window = 1

    def __init__(
        self, url: str, *, storage_options: Mapping[str, object] | None = None, patience: float = 60.0
    ) -> None:
        options = dict(storage_options or {})
        self.label = options.pop("label", None)
        if options:
            raise InvalidArgumentError(f"a cupboard takes no storage_options but label, and got {sorted(options)}.")
        self.url = url
        folder = Path(url.removeprefix("cupboard://"))
        self._file = folder.parent / "cupboard.sqlite"
        self._prefix = f"{folder.name}/"
        self._patience = patience

    @contextlib.contextmanager
    def _open(self, doing: str) -> Iterator[sqlite3.Connection]:
        try:
            connection = sqlite3.connect(self._file, timeout=self._patience)
            with contextlib.closing(connection), connection:
                connection.execute(TABLE)
                yield connection
        except sqlite3.Error as error:
            raise StorageError(f"cannot {doing} in {self.url}: {error}.") from error

    def _path(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def prepare(self) -> None:
        with self._open("make the cupboard"):
            pass

    def list_keys(self, under: str = "", *, recursive: bool = False) -> list[KeyInfo]:
        prefix = self._prefix + (f"{checked_key(under)}/" if under else "")
        with self._open("list") as connection:
            rows = connection.execute("SELECT path, length(bytes), put FROM things").fetchall()
        found = [
            KeyInfo(path.removeprefix(self._prefix), size, put)
            for path, size, put in rows
            if path.startswith(prefix) and (recursive or "/" not in path.removeprefix(prefix))
        ]
        return sorted(found, key=lambda info: info.key)

    def size(self, key: str) -> int:
        return len(self.read(key))

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with self._open(f"read {key!r}") as connection:
            row = connection.execute("SELECT bytes FROM things WHERE path = ?", (path,)).fetchone()
        if row is None:
            raise KeyNotFoundError(f"there is no {key!r} in {self.url}.")
        data: bytes = row[0]
        return data

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        views = checked_buffers(key, ranges, into)
        data = self.read(key)
        for range_, view in zip(ranges, views, strict=True):
            if range_.stop > len(data):
                raise truncated(key, self.url, range_, len(data))
            view[:] = data[range_.offset : range_.stop]

    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        path = self._path(key)
        taken = KeyExistsError(f"{key!r} in {self.url} is taken.")
        if exclusive and any(info.key == key for info in self.list_keys(recursive=True)):
            raise taken
        data = b"".join(bytes(as_bytes(buffer)) for buffer in buffers)
        if len(data) != size:
            raise InvalidArgumentError(f"cannot write {key!r}: {len(data)} bytes came, and {size} were announced.")
        verb = "INSERT" if exclusive else "INSERT OR REPLACE"
        with self._open(f"write {key!r}") as connection:
            try:
                connection.execute(f"{verb} INTO things VALUES (?, ?, ?)", (path, data, time.time()))
            except sqlite3.IntegrityError:
                raise taken from None

    def publish(self, key: str, data: bytes) -> None:
        self.write(key, [memoryview(data)], size=len(data), exclusive=False)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [(self._path(key),) for key in keys]
        with self._open("delete") as connection:
            connection.executemany("DELETE FROM things WHERE path = ?", paths)
