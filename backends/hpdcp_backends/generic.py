"""Any file system that fsspec knows: Google, Azure and other clouds, HDFS, SFTP, SMB, memory, … by their packages."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Literal, TypeVar
from urllib.parse import quote

from fsspec.dircache import DirCache
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

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
    truncated,
    without_password,
)
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    HpdcpError,
    InvalidArgumentError,
    KeyNotFoundError,
    NotSupportedError,
    StorageError,
)
from hpdcp._base.threads import Threads
from hpdcp_backends._generic.stores import (
    ADVICE,
    ONE_VERSION,
    PUT,
    RENAME,
    RMDIR_KEEPS_FULL,
    SHARED,
    file_system_class,
    make_folder,
    modified_at,
    passwords,
    version_of,
)
from hpdcp_backends._posix.files import sync_folder

_T = TypeVar("_T")

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PROBE: Final = "hpdcp-probe"
_TRIES: Final = 10
_ONE_REQUEST_BYTES: Final = 16 << 20
"""Up to here every file system with asyncio fetches a whole file by one request."""
_S3_LEAST_PART: Final = 5 << 20
_MOST_PARTS: Final = 9000


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
        coalesce_gap, max_read_bytes: As in `Backend`.
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
    ) -> None:
        if publish not in (None, "put", "rename"):
            raise InvalidArgumentError(f"publish is {publish!r}; expected 'put' or 'rename'.")
        for option, value, least in (
            ("requests", requests, 1),
            ("part_bytes", part_bytes, _S3_LEAST_PART),
            ("coalesce_gap", coalesce_gap, 0),
            ("max_read_bytes", max_read_bytes, 1),
        ):
            if value < least:
                raise InvalidArgumentError(f"{option} is {value}; expected at least {least}.")
        scheme = _SCHEME.match(url)
        self._protocol = scheme[1].lower() if scheme else "file"
        address, slash, path = (url[scheme.end() :] if scheme else os.path.abspath(url)).partition("/")
        path = path.strip("/")
        shown = f"{self._protocol}://{address}{slash if path else ''}{path}" if scheme else f"/{path}"
        self.url = without_password(shown)
        self._secrets = passwords(address)
        self._kind = file_system_class(self._protocol, self.url)
        # Only the address says how to connect; a path that looks like a query must not.
        connection = f"{self._protocol}://{address}{slash}{quote(path)}"
        self._arguments = {**self._kind._get_kwargs_from_urls(connection), **(storage_options or {})}
        self._root = self._path_within(address, path)
        self._style: Literal["put", "rename"] | None
        if publish is None:
            self._style = "put" if self._protocol in PUT else "rename" if self._protocol in RENAME else None
        else:
            self._style = "put" if publish == "put" else "rename"
        self.process_local = self._protocol == "memory"
        self.coalesce_gap = coalesce_gap
        self.max_read_bytes = max_read_bytes
        self._part_bytes = part_bytes
        parallel = self._kind.async_impl or self._protocol in SHARED
        self._requests = requests if parallel else 1
        self._turn: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext() if parallel else threading.RLock()
        )
        self._opening = threading.Lock()
        self._opened: AbstractFileSystem | None = None

    # The file system

    def _path_within(self, address: str, path: str) -> str:
        """What the file system calls the root, without a slash at the end."""
        probed = self._kind._strip_protocol(f"{self._protocol}://{address}/{_PROBE}")
        if not isinstance(probed, str) or not probed.endswith(_PROBE):
            raise NotSupportedError(f"{self.url}: {self._protocol}:// names things by other means than paths.")
        literal = quote(path) if self._protocol in ("http", "https") else path
        return (probed.removesuffix(_PROBE) + literal).rstrip("/")

    def _path(self, key: str) -> str:
        literal = quote(checked_key(key)) if self._protocol in ("http", "https") else checked_key(key)
        return f"{self._root}/{literal}"

    def _file_system(self) -> AbstractFileSystem:
        with self._opening:
            if self._opened is None:
                opened = self._kind(**self._arguments, skip_instance_cache=True)
                # Not by an argument: SFTP and others hand the ones they do not know to their SDK.
                opened.dircache = DirCache(use_listings_cache=False)
                self._opened = opened
            return self._opened

    @contextlib.contextmanager
    def _using(self, doing: str, key: str | None = None) -> Iterator[AbstractFileSystem]:
        """The file system, for one thing; whatever it raises comes out as an error that names what, and where."""
        with self._turn:
            try:
                yield self._file_system()
            except HpdcpError:
                raise
            except Exception as error:
                # SDKs raise errors of many families, not all of them OSErrors.
                raise self._failure(error, doing, key) from error

    def _failure(self, error: Exception, doing: str, key: str | None) -> HpdcpError:
        what = self.url if key is None else f"{key!r} in {self.url}"
        text = " ".join(str(error).split()) or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if isinstance(error, NotImplementedError):
            return NotSupportedError(f"cannot {doing} {what}: {self._kind.__name__} does not implement that ({text}).")
        if isinstance(error, FileNotFoundError) and key is not None and doing == "read":
            return KeyNotFoundError(f"cannot read {what}: it is not there ({text}).")
        advice = next((advice for kind, advice in ADVICE if isinstance(error, kind)), "")
        translated = StorageError(f"cannot {doing} {what}: {type(error).__name__}: {text}. {advice}".rstrip())
        translated.errno = error.errno if isinstance(error, OSError) else None
        return translated

    def close(self) -> None:
        with self._opening:
            self._opened = None

    # Looking

    def prepare(self) -> None:
        if self._publishes_by() == "rename":
            with self._using("create the folder") as files:
                make_folder(files, self._root or files.root_marker)

    def list_keys(self, under: str = "", *, recursive: bool = False) -> list[KeyInfo]:
        if under:
            checked_key(under)
        found: list[KeyInfo] = []
        with self._using("list") as files:
            if not self._scan(files, under, recursive, found) and self._protocol in RENAME:
                root = self._root or files.root_marker
                if not files.isdir(root):
                    raise CheckpointNotFoundError(f"{self.url} is not there.")
        return sorted(found, key=lambda info: info.key)

    def list_folders(self) -> list[str]:
        with self._using("list") as files:
            root = self._root or files.root_marker
            files.invalidate_cache(root)
            try:
                entries = files.ls(root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"}
        return sorted(filter(can_be_key, names))

    def _scan(self, files: AbstractFileSystem, under: str, recursive: bool, found: list[KeyInfo]) -> bool:
        """Whether the folder is there. `find` is no help: it leaves out what it may not list, and says nothing."""
        folder = self._path(under) if under else self._root or files.root_marker
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
        path = self._path(key)
        with self._using("read", key) as files:
            return int(self._info(files, path, key)["size"])

    def _info(self, files: AbstractFileSystem, path: str, key: str) -> Mapping[str, Any]:
        files.invalidate_cache(path)
        info: Mapping[str, Any] = files.info(path)
        if info["type"] == "directory":
            raise KeyNotFoundError(f"cannot read {key!r} in {self.url}: a folder of that name is there, and no file.")
        if info["size"] is None:
            raise NotSupportedError(f"cannot read {key!r} in {self.url}: the store does not say how long it is.")
        return info

    # Reading

    def read(self, key: str) -> bytes:
        path = self._path(key)

        def whole(info: Mapping[str, Any]) -> bytes:
            with self._using("read", key) as files:
                data: bytes = files.cat_file(path)
            if len(data) < info["size"]:
                raise truncated(key, self.url, ByteRange(0, info["size"]), len(data))
            return data

        if self._kind.async_impl or self._protocol in ONE_VERSION:
            with self._using("read", key) as files:
                data: bytes = files.cat_file(path)
            if self._protocol in ONE_VERSION or len(data) <= _ONE_REQUEST_BYTES:
                return data
        return self._steadily(key, path, whole)

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        path = self._path(key)
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
            self._together([partial(self._fetch, key, path, fetch) for fetch in wanted])

        self._steadily(key, path, fill)

    def _fetch(self, key: str, path: str, fetch: Fetch) -> None:
        start, stop = fetch.range.offset, fetch.range.stop
        try:
            with self._using("read", key) as files:
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
            with self._using("read", key) as files:
                info = self._info(files, path, key)
            result = work(info)
            with self._using("read", key) as files:
                if version_of(self._info(files, path, key)) == version_of(info):
                    return result
        raise StorageError(
            f"cannot read {key!r} in {self.url}: it was replaced {_TRIES} times while it was being read."
        )

    def _together(self, works: Sequence[Callable[[], None]]) -> None:
        """Do all of them, several at a time; the first failure is raised when nothing runs any more."""
        if self._requests == 1 or len(works) <= 1:
            for work in works:
                work()
            return
        with Threads(min(self._requests, len(works)), thread_name_prefix="hpdcp-fsspec") as pool:
            running = [pool.submit(work) for work in works]
            try:
                for future in running:
                    future.result()
            finally:
                for future in running:
                    future.cancel()

    # Writing

    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        path = self._path(key)
        if exclusive:
            raise NotSupportedError(
                f"cannot create {key!r} in {self.url} only if it is not there: not every file system that fsspec knows "
                "can do that. Choose another name."
            )
        pieces = self._pieces(key, buffers, size)
        if self._publishes_by() == "rename":
            self._write_and_rename(key, path, pieces)
        elif size <= self._part_bytes or self._protocol == "memory":
            whole = b"".join(pieces)
            with self._using("write", key) as files:
                files.pipe_file(path, whole)
        else:
            self._upload(key, path, pieces, size)

    def publish(self, key: str, data: bytes) -> None:
        self.write(key, [memoryview(data)], size=len(data), exclusive=False)

    def _pieces(self, key: str, buffers: Iterable[memoryview], size: int) -> Iterator[bytes | memoryview]:
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

    def _upload(self, key: str, path: str, pieces: Iterator[bytes | memoryview], size: int) -> None:
        mebibytes = max(self._part_bytes, size // _MOST_PARTS) + (1 << 20) - 1 >> 20
        with self._using("write", key) as files:
            file = files.open(path, "wb", block_size=mebibytes << 20)
        if not isinstance(file, AbstractBufferedFile):
            raise NotSupportedError(
                f"cannot write {key!r} in {self.url}: {self._kind.__name__} does not upload in parts that can be given "
                'up, so publish = "put" is not right for it. Try publish = "rename".'
            )
        try:
            for piece in pieces:
                with self._using("write", key):
                    file.write(piece)
            with self._using("write", key):
                file.close()
        except BaseException:
            # To leave a `with`, or to be collected, would complete the upload with what has come so far.
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise

    def _write_and_rename(self, key: str, path: str, pieces: Iterator[bytes | memoryview]) -> None:
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        with self._using("write", key) as files:
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
                    with self._using("write", key):
                        file.write(piece)
                    size += len(piece)
            finally:
                with self._using("write", key):
                    if self._on_disk:
                        file.flush()
                        os.fsync(file.fileno())
                    file.close()
            with self._using("write", key) as files:
                self._rename(files, temporary, path, key, size)
        except BaseException:
            with contextlib.suppress(Exception), self._using("clean up", key) as files:
                files.rm_file(temporary)
            raise

    def _rename(self, files: AbstractFileSystem, temporary: str, path: str, key: str, size: int) -> None:
        """Give the file its name, and make sure that it has it: HDFS over HTTP answers politely and does nothing."""
        if files.isdir(path):
            raise StorageError(f"cannot write {key!r} in {self.url}: a folder of that name is there.")
        there = files.exists(path)
        problem: Exception | None = None
        try:
            files.mv(temporary, path)
            if self._on_disk:
                sync_folder(os.path.dirname(path))
        except Exception as error:  # noqa: BLE001 - said below, or raised again
            problem = error
        files.invalidate_cache(path)
        if problem is None and not files.exists(temporary) and files.info(path)["size"] == size:
            return
        if there and files.exists(temporary):
            raise StorageError(
                f"cannot replace {key!r} in {self.url}: {self._protocol}:// does not rename a file over one that is "
                f"there ({problem or 'the rename had no effect'}), so nothing there can be replaced in one step. Save "
                "each checkpoint to a folder of its own."
            ) from problem
        raise problem or StorageError(f"cannot write {key!r} in {self.url}: the file did not take its name.")

    @property
    def _on_disk(self) -> bool:
        return self._protocol in ("file", "local")

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
        paths = {key: self._path(key) for key in keys}
        failures: list[StorageError] = []
        folders: set[str] = set()

        def remove(key: str, path: str) -> None:
            try:
                with self._using("delete", key) as files:
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

        self._together([partial(remove, key, path) for key, path in paths.items()])
        if self._protocol in RMDIR_KEEPS_FULL:
            for folder in folders - {self._root}:
                with contextlib.suppress(StorageError), self._using("delete") as files:
                    files.rmdir(folder)
        if self._on_disk:
            for folder in folders:
                with self._using("delete"), contextlib.suppress(FileNotFoundError):
                    sync_folder(folder)
        if failures:
            raise failures[0]

    def remove_leftovers(self, *, silent_for: float, belongs: Callable[[str], bool]) -> None:
        del belongs  # temporary files bear the mark of hpdcp; an upload that never ended is for the store to forget
        if self._style != "rename":
            return
        with self._using("clear away what killed writers left in") as files:
            root = self._root or files.root_marker
            files.invalidate_cache(root)
            for entry in files.ls(root, detail=True):
                name = entry["name"].rstrip("/").rpartition("/")[2]
                if not name.startswith(TEMPORARY_PREFIX) or entry["type"] != "file":
                    continue
                if time.time() - modified_at(entry) >= silent_for:
                    with contextlib.suppress(FileNotFoundError):
                        files.rm_file(entry["name"])
