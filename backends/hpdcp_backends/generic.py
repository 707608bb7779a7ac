"""Any file system that fsspec knows: Google, Azure and other clouds, HDFS, SFTP, SMB, memory, … by their packages."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Literal, TypeVar

from fsspec.spec import AbstractFileSystem

from hpdcp._base.backend import (
    TEMPORARY_PREFIX,
    Backend,
    ByteRange,
    Fetch,
    KeyInfo,
    as_bytes,
    can_be_key,
    check_empty,
    checked_buffers,
    checked_key,
    fetches,
    is_left_over,
    truncated,
)
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    KeyNotFoundError,
    NotSupportedError,
    StorageError,
)
from hpdcp_backends._generic.connection import Connection
from hpdcp_backends._generic.stores import (
    ONE_VERSION,
    PUT,
    RENAME,
    RMDIR_KEEPS_FULL,
    make_folder,
    modified_at,
    version_of,
)
from hpdcp_backends._generic.writing import Writer
from hpdcp_backends._posix.files import sync_folder
from hpdcp_backends._tunables import at_least

_T = TypeVar("_T")

_TRIES: Final = 10
_ONE_REQUEST_BYTES: Final = 16 << 20
"""Up to here every file system with asyncio fetches a whole file by one request."""
_S3_LEAST_PART: Final = 5 << 20


class GenericBackend(Backend):
    """Any URL that fsspec serves.

    The file system is made when first used, for this backend alone, and its listings are never cached. What a store
    has acknowledged counts as durable; only for `file://` is there more to do, and it is done.

    Args:
        url: With the scheme of an fsspec file system; a plain path counts as `file://`. What follows the host or
            bucket is a path, taken literally: `#`, `?` and `%` mean nothing.
        storage_options: For the file system's constructor, untouched; they go before what the URL says.
        publish: How a file is replaced in one step: `put` where an upload appears when it is complete, `rename` where
            files are renamed over others. Known for the usual protocols; for others it must be said before anything
            is written there.
        requests: How many run at a time, where the file system allows for several.
        part_bytes: Size of the parts of an upload; objects up to this size are uploaded by one request. Larger where
            an object would have more than 9,000 parts.
        coalesce_gap, max_read_bytes, max_concurrent_reads: As in `Backend`.
    """

    name: ClassVar[str] = "fsspec"
    remote: ClassVar[bool] = True
    shares_page_cache: ClassVar[bool] = False

    conditional_create = False
    write_window = 1

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, object] | None = None,
        publish: str | None = None,
        requests: int = 16,
        part_bytes: int = 16 << 20,
        coalesce_gap: int = Backend.coalesce_gap,
        max_read_bytes: int = Backend.max_read_bytes,
        max_concurrent_reads: int = Backend.max_concurrent_reads,
    ) -> None:
        if publish not in (None, "put", "rename"):
            raise InvalidArgumentError(f"publish is {publish!r}; expected 'put' or 'rename'.")
        at_least("requests", requests, 1)
        at_least("part_bytes", part_bytes, _S3_LEAST_PART)
        at_least("coalesce_gap", coalesce_gap, 0)
        at_least("max_read_bytes", max_read_bytes, 1)
        at_least("max_concurrent_reads", max_concurrent_reads, 1)
        self._connection = Connection(url, storage_options, requests=requests)
        self._writer = Writer(self._connection, part_bytes=part_bytes)
        self._protocol = self._connection.protocol
        self.url = self._connection.url
        self._style: Literal["put", "rename"] | None
        if publish is None:
            self._style = "put" if self._protocol in PUT else "rename" if self._protocol in RENAME else None
        else:
            self._style = "put" if publish == "put" else "rename"
        self.process_local = self._protocol == "memory"
        self.coalesce_gap = coalesce_gap
        self.max_read_bytes = max_read_bytes
        self.max_concurrent_reads = max_concurrent_reads
        self._part_bytes = part_bytes

    def close(self) -> None:
        self._connection.close()

    # Looking

    def prepare(self) -> None:
        if self._publishes_by() == "rename":
            with self._connection.using("create the folder") as files:
                make_folder(files, self._connection.folder("", files))

    def list_keys(self, under: str = "", *, recursive: bool = False) -> list[KeyInfo]:
        if under:
            checked_key(under)
        found: list[KeyInfo] = []
        with self._connection.using("list") as files:
            if not self._scan(files, under, recursive, found) and self._protocol in RENAME:
                root = self._connection.folder("", files)
                if not files.isdir(root):
                    raise CheckpointNotFoundError(f"{self.url} is not there.")
        return sorted(found, key=lambda info: info.key)

    def list_folders(self) -> list[str]:
        with self._connection.using("list") as files:
            root = self._connection.folder("", files)
            files.invalidate_cache(root)
            try:
                entries = files.ls(root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"}
        return sorted(filter(can_be_key, names))

    def _scan(self, files: AbstractFileSystem, under: str, recursive: bool, found: list[KeyInfo]) -> bool:
        """Whether the folder is there. `find` is no help: it leaves out what it may not list, and says nothing."""
        folder = self._connection.folder(under, files)
        files.invalidate_cache(folder)
        try:
            entries = files.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return False
        for entry in entries:
            path = entry["name"].rstrip("/")
            name = path.rpartition("/")[2]
            key = f"{under}/{name}" if under else name
            # A file is listed as if it were its own folder, by most; and by S3 a folder that somebody put there.
            if path.strip("/") == folder.strip("/") or not can_be_key(key):
                continue
            if entry["type"] not in ("file", "directory"):
                # A symbolic link.
                try:
                    entry = files.info(path)
                except FileNotFoundError:
                    continue
            if entry["type"] == "directory":
                if recursive:
                    self._scan(files, key, recursive, found)
            elif entry["type"] == "file":
                found.append(KeyInfo(key, int(entry["size"] or 0), modified_at(entry)))
        return True

    def size(self, key: str) -> int:
        path = self._connection.path(key)
        with self._connection.using("read", key) as files:
            return int(self._connection.info(files, path, key)["size"])

    # Reading

    def read(self, key: str) -> bytes:
        path = self._connection.path(key)

        def whole(info: Mapping[str, Any]) -> bytes:
            with self._connection.using("read", key) as files:
                data: bytes = files.cat_file(path)
            if len(data) < info["size"]:
                raise truncated(key, self.url, ByteRange(0, info["size"]), len(data))
            return data

        if self._connection.kind.async_impl or self._protocol in ONE_VERSION:
            with self._connection.using("read", key) as files:
                data: bytes = files.cat_file(path)
            if self._protocol in ONE_VERSION or len(data) <= _ONE_REQUEST_BYTES:
                return data
        return self._steadily(key, path, whole)

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        path = self._connection.path(key)
        views = checked_buffers(key, ranges, into)
        wanted = fetches(ranges, views, gap=self.coalesce_gap, most_bytes=self.max_read_bytes)
        check_empty(self, key, ranges)
        if len(wanted) <= 1:
            for fetch in wanted:
                self._fetch(key, path, fetch)
            return

        def fill(info: Mapping[str, Any]) -> None:
            furthest = max(ranges, key=lambda range_: range_.stop)
            if furthest.stop > info["size"]:
                raise truncated(key, self.url, furthest, info["size"])
            self._connection.together([partial(self._fetch, key, path, fetch) for fetch in wanted])

        self._steadily(key, path, fill)

    def _fetch(self, key: str, path: str, fetch: Fetch) -> None:
        start, stop = fetch.range.offset, fetch.range.stop
        try:
            with self._connection.using("read", key) as files:
                data = files.cat_file(path, start=start, end=stop)
        except KeyNotFoundError:
            raise
        except StorageError:
            # Some stores answer with an error when a range begins behind the end.
            size = self.size(key)
            if stop > size:
                raise truncated(key, self.url, fetch.range, size) from None
            raise
        if len(data) != fetch.range.length:
            size = self.size(key)
            if stop > size:
                raise truncated(key, self.url, fetch.range, size)
            raise StorageError(
                f"cannot read {key!r} in {self.url}: the store sent {len(data)} bytes where {start} to {stop} were "
                "asked for. Does it, or a proxy before it, ignore ranges?"
            )
        fetch.scatter(memoryview(data))

    def _steadily(self, key: str, path: str, work: Callable[[Mapping[str, Any]], _T]) -> _T:
        """What `work` makes of the key, given what the store says of it, once that is the same before and after."""
        for _ in range(_TRIES):
            with self._connection.using("read", key) as files:
                info = self._connection.info(files, path, key)
            result = work(info)
            with self._connection.using("read", key) as files:
                if version_of(self._connection.info(files, path, key)) == version_of(info):
                    return result
        raise StorageError(
            f"cannot read {key!r} in {self.url}: it was replaced {_TRIES} times while it was being read."
        )

    # Writing

    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        checked_key(key)
        if exclusive:
            raise NotSupportedError(
                f"cannot create {key!r} in {self.url} only if it is not there: not every file system that fsspec knows "
                "can do that. Choose another name."
            )
        pieces = self._pieces(key, buffers, size)
        if self._publishes_by() == "rename":
            self._writer.write_and_rename(key, pieces)
        elif size <= self._part_bytes or self._protocol == "memory":
            self._writer.put(key, pieces)
        else:
            self._writer.upload(key, pieces, size=size)

    def publish(self, key: str, data: bytes) -> None:
        self.write(key, [memoryview(data)], size=len(data), exclusive=False)

    def _pieces(self, key: str, buffers: Iterable[memoryview], size: int) -> Iterator[bytes]:
        """The buffers' bytes, at most a part at a time; an error unless they are `size` in all."""
        where = f"cannot write {key!r} in {self.url}"
        total = 0
        for buffer in buffers:
            view = as_bytes(buffer)
            total += len(view)
            if total > size:
                raise InvalidArgumentError(f"{where}: the buffers hold more than the {size} bytes that were announced.")
            for start in range(0, len(view), self._part_bytes):
                # Copied, since whoever joins them has to keep them, and the producer may reuse its memory.
                yield bytes(view[start : start + self._part_bytes])
        if total != size:
            raise InvalidArgumentError(f"{where}: the buffers hold {total} bytes, but {size} were announced.")

    def _publishes_by(self) -> Literal["put", "rename"]:
        if self._style is None:
            raise NotSupportedError(
                f"cannot write to {self.url}: hpdcp does not know how {self._protocol}:// replaces a file in one step. "
                'Say so in the configuration: under [backends.fsspec], publish = "put" where an upload appears only '
                'when it is complete (object stores), publish = "rename" where a file can be renamed over another.'
            )
        return self._style

    # Deleting

    def delete(self, keys: Iterable[str]) -> None:
        paths = {key: self._connection.path(key) for key in keys}
        failures: list[StorageError] = []
        folders: set[str] = set()

        def remove(key: str, path: str) -> None:
            if self._connection.on_disk and _leads_out(path, key):
                return
            try:
                with self._connection.using("delete", key) as files:
                    try:
                        files.rm_file(path)
                    except Exception:
                        # FTP has an error of its own for what is not there.
                        files.invalidate_cache(path)
                        if files.exists(path):
                            raise
                    else:
                        folders.add(path.rpartition("/")[0])
            except StorageError as error:
                failures.append(error)

        self._connection.together([partial(remove, key, path) for key, path in paths.items()])
        if self._protocol in RMDIR_KEEPS_FULL:
            for folder in folders - {self._connection.root}:
                with contextlib.suppress(StorageError), self._connection.using("delete") as files:
                    files.rmdir(folder)
        if self._connection.on_disk:
            for folder in folders:
                with self._connection.using("delete"), contextlib.suppress(FileNotFoundError):
                    sync_folder(folder)
        if failures:
            raise failures[0]

    def remove_leftovers(self, *, silent_for: float, belongs: Callable[[str], bool]) -> None:
        del belongs  # temporary files bear the mark of hpdcp; an upload that never ended is for the store to forget
        if self._style != "rename":
            return
        with self._connection.using("clear away what killed writers left in") as files:
            root = self._connection.folder("", files)
            files.invalidate_cache(root)
            for entry in files.ls(root, detail=True):
                name = entry["name"].rstrip("/").rpartition("/")[2]
                if not name.startswith(TEMPORARY_PREFIX) or entry["type"] != "file":
                    continue
                if time.time() - modified_at(entry) >= silent_for or is_left_over(name):
                    with contextlib.suppress(FileNotFoundError):
                        files.rm_file(entry["name"])


def _leads_out(path: str, key: str) -> bool:
    """Whether a folder between the root and the file is a link."""
    folder = os.path.dirname(path)
    for _ in range(key.count("/")):
        if os.path.islink(folder):
            return True
        folder = os.path.dirname(folder)
    return False
