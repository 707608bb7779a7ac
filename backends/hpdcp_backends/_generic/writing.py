"""How a file takes its place in one step on a file system of fsspec's: by an upload that ends, or by a rename."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Final

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from hpdcp._base.backend import temporary_name
from hpdcp._base.errors import NotSupportedError, StorageError
from hpdcp_backends._generic.connection import Connection
from hpdcp_backends._generic.stores import make_folder
from hpdcp_backends._posix.files import sync_folder

_MOST_PARTS: Final = 9000


class Writer:
    """Writes the files of one connection; after a failure nothing of a file is left.

    Args:
        connection: Where to.
        part_bytes: Size of the parts of an upload; larger where an object would have more than 9,000 parts.
    """

    def __init__(self, connection: Connection, *, part_bytes: int) -> None:
        self._connection = connection
        self._url = connection.url
        self._protocol = connection.protocol
        self._part_bytes = part_bytes

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        """Store the pieces, joined, by one request."""
        path, whole = self._connection.path(key), b"".join(pieces)
        with self._connection.using("write", key) as files:
            files.pipe_file(path, whole)

    def upload(self, key: str, pieces: Iterable[bytes], *, size: int) -> None:
        """Store the pieces, `size` bytes together, as an upload in parts."""
        path = self._connection.path(key)
        mebibytes = max(self._part_bytes, size // _MOST_PARTS) + (1 << 20) - 1 >> 20
        with self._connection.using("write", key) as files:
            file = files.open(path, "wb", block_size=mebibytes << 20)
        if not isinstance(file, AbstractBufferedFile):
            raise NotSupportedError(
                f"cannot write {key!r} in {self._url}: {self._connection.kind.__name__} does not upload in parts that "
                'can be given up, so publish = "put" is not right for it. Try publish = "rename".'
            )
        try:
            for piece in pieces:
                with self._connection.using("write", key):
                    file.write(piece)
            with self._connection.using("write", key):
                file.close()
        except BaseException:
            # To leave a `with`, or to be collected, would complete the upload with what has come so far.
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise

    def write_and_rename(self, key: str, pieces: Iterable[bytes]) -> None:
        """Write a file of another name at the root, where what killed writers leave is looked for, and rename it."""
        path = self._connection.path(key)
        folder = path.rpartition("/")[0]
        temporary = f"{self._connection.root}/{temporary_name()}"
        with self._connection.using("write", key) as files:
            if "/" in key:
                make_folder(files, folder)
            file = files.open(temporary, "wb")
            if self._protocol in ("sftp", "ssh"):
                # Else paramiko waits for an answer to every 32 KiB: under 1 MB/s, measured on loopback.
                file.set_pipelined(True)
        try:
            size = 0
            try:
                for piece in pieces:
                    with self._connection.using("write", key):
                        file.write(piece)
                    size += len(piece)
            finally:
                with self._connection.using("write", key):
                    if self._connection.on_disk:
                        file.flush()
                        os.fsync(file.fileno())
                    file.close()
            with self._connection.using("write", key) as files:
                self._rename(files, temporary, path, key, size)
        except BaseException:
            with contextlib.suppress(Exception), self._connection.using("clean up", key) as files:
                files.rm_file(temporary)
            raise

    def _rename(self, files: AbstractFileSystem, temporary: str, path: str, key: str, size: int) -> None:
        """Give the file its name, and make sure that it has it: HDFS over HTTP answers politely and does nothing."""
        if files.isdir(path):
            raise StorageError(f"cannot write {key!r} in {self._url}: a folder of that name is there.")
        there = files.exists(path)
        problem: Exception | None = None
        try:
            files.mv(temporary, path)
            if self._connection.on_disk:
                sync_folder(os.path.dirname(path))
        except Exception as error:  # noqa: BLE001 - said below, or raised again
            problem = error
        files.invalidate_cache(path)
        if problem is None and not files.exists(temporary) and files.info(path)["size"] == size:
            return
        if there and files.exists(temporary):
            raise StorageError(
                f"cannot replace {key!r} in {self._url}: {self._protocol}:// does not rename a file over one "
                f"that is there ({problem or 'the rename had no effect'}), so nothing can be replaced in one step. "
                "Save each checkpoint to a folder of its own."
            ) from problem
        raise problem or StorageError(f"cannot write {key!r} in {self._url}: the file did not take its name.")
