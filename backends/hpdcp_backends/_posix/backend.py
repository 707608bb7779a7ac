"""What every backend on mounted folders does alike; how names are looked up is each one's own."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, TypeVar

from hpdcp._base.backend import (
    TEMPORARY_PREFIX,
    Backend,
    ByteRange,
    KeyInfo,
    can_be_key,
    checked_buffers,
    checked_key,
    is_left_over,
    storage_error,
    temporary_name,
    truncated,
)
from hpdcp._base.errors import CheckpointNotFoundError, HpdcpError, InvalidArgumentError, StorageError
from hpdcp._base.locations import local_path
from hpdcp_backends._posix.blocks import read_tasks, run_tasks, write_buffers
from hpdcp_backends._posix.files import make_folders, read_fully, sync_folder, write_fully
from hpdcp_backends._posix.locks import LOCK, PublishingLock
from hpdcp_backends._posix.open_files import OpenFile, identity, read_file
from hpdcp_backends._tunables import at_least

T = TypeVar("T")

_PARALLEL_FROM_BYTES: Final = 16 << 20
"""Below this, starting a thread costs more than it saves."""
_CACHED_BYTES: Final = 512 << 10
"""Written at a time where the calling thread writes itself: what it has just made is in the processor's cache still."""


class PosixBackend(Backend):
    """A folder, given as a path or as `file://` and a path; `~` is expanded, and a relative path is resolved at once.

    What follows `file://` is taken as it stands: `%20` is not a space (fsspec does the same).

    Args:
        url: The folder.
        storage_options: Nothing; a mounted folder has no options, and one that is given is refused.
        write_threads: Threads that write while the calling one prepares the next buffers; 0 writes in the calling one.
        read_threads: Threads that read one `read_ranges` together.
        block_bytes: Bytes per system call.
        max_concurrent_reads: As in `Backend`.
    """

    conditional_create = True

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, object] | None,
        write_threads: int,
        read_threads: int,
        block_bytes: int,
        max_concurrent_reads: int,
    ) -> None:
        if storage_options:
            raise InvalidArgumentError(
                f"the backend {self.name!r} takes no storage_options, but {sorted(storage_options)} were given."
            )
        at_least("write_threads", write_threads, 0)
        at_least("read_threads", read_threads, 1)
        at_least("block_bytes", block_bytes, 1)
        at_least("max_concurrent_reads", max_concurrent_reads, 1)
        self.url = local_path(url)
        self.max_concurrent_reads = max_concurrent_reads
        self.write_window = block_bytes * (2 * write_threads + 1)
        self._write_threads = write_threads
        self._read_threads = read_threads
        self._block_bytes = block_bytes
        self._lock = PublishingLock(os.path.join(self.url, LOCK))

    @abstractmethod
    def _opened(self, path: str) -> AbstractContextManager[OpenFile]:
        """The file at `path` as it is now, open for reading."""

    def _entries(self, folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        """What the folder holds now."""
        return os.scandir(folder)

    def _looking_up(self, path: str, look: Callable[[], T]) -> T:
        """`look()`, which finds out something about the name `path`; again, where what it found may be out of date."""
        del path
        return look()

    def prepare(self) -> None:
        with self._translating("create the folder"):
            self._looking_up(self.url, partial(make_folders, self.url))

    def list_keys(self, under: str = "", *, recursive: bool = False) -> list[KeyInfo]:
        if under:
            checked_key(under)
        found: list[KeyInfo] = []
        with self._translating("list"):
            try:
                self._looking_up(self.url, partial(os.stat, os.path.join(self.url, "")))
            except FileNotFoundError:
                raise CheckpointNotFoundError(f"{self.url} is not there.") from None
            self._scan(under, recursive, found)
        return sorted(found, key=lambda info: info.key)

    def list_folders(self) -> list[str]:
        with self._translating("list"):
            try:
                with os.scandir(self.url) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir() and self._can_be_key(entry.name))
            except FileNotFoundError:
                raise CheckpointNotFoundError(f"{self.url} is not there.") from None

    def _scan(self, under: str, recursive: bool, found: list[KeyInfo]) -> None:
        folder = os.path.join(self.url, under)
        try:
            found.extend(self._looking_up(folder, partial(self._listed, folder, under, recursive)))
        except (FileNotFoundError, NotADirectoryError):
            return

    def _listed(self, folder: str, under: str, recursive: bool) -> list[KeyInfo]:
        found: list[KeyInfo] = []
        folders: list[str] = []
        with self._entries(folder) as entries:
            for entry in entries:
                key = f"{under}/{entry.name}" if under else entry.name
                if not self._can_be_key(key):
                    continue
                if recursive and entry.is_dir(follow_symlinks=False):
                    folders.append(key)
                elif entry.is_file():
                    # A file may vanish between its name and its status.
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        found.append(KeyInfo(key, status.st_size, status.st_mtime))
        for key in folders:
            self._scan(key, recursive, found)
        return found

    def size(self, key: str) -> int:
        path = self._path(key)

        def look() -> int:
            with self._opened(path) as file:
                return file.size

        with self._translating("look at", key):
            return self._looking_up(path, look)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with self._translating("read", key):
            data, size = self._looking_up(path, partial(read_file, path))
        if len(data) < size:
            raise truncated(key, self.url, ByteRange(0, size), len(data))
        return data

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        path = self._path(key)
        views = checked_buffers(key, ranges, into)
        tasks = read_tasks(ranges, views, block_bytes=self._block_bytes)
        total = sum(map(len, views))
        threads = self._read_threads if total >= _PARALLEL_FROM_BYTES else 1

        def look() -> None:
            with self._opened(path) as file:
                self._check_size(key, ranges, file.size)

                def read_task(buffers: list[memoryview], offset: int) -> None:
                    wanted = sum(map(len, buffers))
                    count = read_fully(file.descriptor, buffers, offset)
                    if count < wanted:
                        raise truncated(key, self.url, ByteRange(offset, wanted), offset + count)

                run_tasks(tasks, read_task, threads=threads)

        with self._translating("read", key):
            self._looking_up(path, look)

    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        path = self._path(key)
        if exclusive:
            self._create(key, path, buffers, size)
        else:
            self._replace(key, path, buffers, size)

    def publish(self, key: str, data: bytes) -> None:
        self._replace(key, self._path(key), [memoryview(data)], len(data))

    @property
    def conditional_publish(self) -> bool:
        return self._lock.works

    def publish_if(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        checked_key(key)
        with contextlib.ExitStack() as held:
            with self._translating("lock the folder to publish", key):
                held.enter_context(self._lock.held(partial(self._looking_up, self._lock.path)))
            super().publish_if(key, data, expected=expected)

    def delete(self, keys: Iterable[str]) -> None:
        paths = {key: self._path(key) for key in keys}
        folders: dict[str, str] = {}
        failure: StorageError | None = None
        for key, path in paths.items():
            self._forget(path)
            try:
                self._looking_up(path, partial(self._unlink, key, path))
                folders[os.path.dirname(path)] = key
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                failure = failure or storage_error(error, doing="delete", url=self.url, key=key)
        changed: dict[str, str] = {}
        for folder, key in folders.items():
            while folder != self.url and self._remove_empty(folder):
                folder = os.path.dirname(folder)
            changed[folder] = key
        for folder, key in changed.items():
            try:
                sync_folder(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = failure or storage_error(error, doing="delete", url=self.url, key=key)
        if failure is not None:
            raise failure

    def remove_leftovers(self, *, silent_for: float, belongs: Callable[[str], bool]) -> None:
        del belongs  # temporary files bear the mark of hpdcp
        now = time.time()
        with self._translating("clear away what killed writers left in"), self._entries(self.url) as entries:
            for entry in entries:
                if entry.name == LOCK:
                    self._lock.remove()
                elif entry.name.startswith(TEMPORARY_PREFIX) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        silent = now - entry.stat(follow_symlinks=False).st_mtime
                        if silent >= silent_for or is_left_over(entry.name):
                            os.unlink(os.path.join(self.url, entry.name))

    def _unlink(self, key: str, path: str) -> None:
        """Remove the name, below the root only: a folder on the way that is a link is as one that is not there."""
        folders, _, name = key.rpartition("/")
        if not folders:
            os.unlink(path)
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        descriptor = os.open(self.url, flags)
        try:
            for folder in folders.split("/"):
                try:
                    below = os.open(folder, flags | os.O_NOFOLLOW, dir_fd=descriptor)
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
                    raise
                os.close(descriptor)
                descriptor = below
            os.unlink(name, dir_fd=descriptor)
        finally:
            os.close(descriptor)

    def _forget(self, path: str) -> None:
        """Close what is open of `path`: the space of a file that is deleted is free only then."""

    def _remove_empty(self, folder: str) -> bool:
        """Remove the folder if that is possible; whether it was."""
        # One that still holds something refuses, and one that others are about to fill is made again.
        try:
            os.rmdir(folder)
        except OSError:
            return False
        return True

    def _path(self, key: str) -> str:
        return os.path.join(self.url, checked_key(key))

    def _can_be_key(self, name: str) -> bool:
        return can_be_key(name)

    def _check_size(self, key: str, ranges: Sequence[ByteRange], size: int) -> None:
        furthest = max(ranges, key=lambda range_: range_.stop, default=None)
        if furthest is not None and furthest.stop > size:
            raise truncated(key, self.url, furthest, size)

    @contextlib.contextmanager
    def _translating(self, doing: str, key: str | None = None) -> Iterator[None]:
        try:
            yield
        except HpdcpError:
            raise
        except OSError as error:
            raise storage_error(error, doing=doing, url=self.url, key=key) from error

    def _replace(self, key: str, path: str, buffers: Iterable[memoryview], size: int) -> None:
        """Write a file of another name in the same folder, then give it this name.

        In the same folder, since a network file system may not see a folder that another host has just made, when a
        file is renamed into it.
        """
        temporary = os.path.join(os.path.dirname(path), temporary_name())
        self._create(key, temporary, buffers, size, rename_to=path)

    def _create(
        self, key: str, path: str, buffers: Iterable[memoryview], size: int, *, rename_to: str | None = None
    ) -> None:
        """Write a file that is not there yet, durably; remove it again, and only it, if anything fails."""
        with self._translating("create", key):
            descriptor = self._looking_up(path, partial(self._open_new, key, path))
        created = identity(os.fstat(descriptor))[:2]
        try:
            try:
                self._fill(key, descriptor, buffers, size)
            except BaseException:
                # What went wrong first is what is told. What was not sent yet need not be, least of all to a full disk.
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)
                with contextlib.suppress(OSError):
                    os.close(descriptor)
                raise
            with self._translating("write", key):
                # Network file systems may report only here what became of the bytes.
                os.close(descriptor)
                if rename_to is not None:
                    self._rename(path, rename_to, created)
                sync_folder(os.path.dirname(path))
        except BaseException:
            # After the rename there is nothing under `path`: the key keeps the new bytes, whole, if not yet durable.
            with contextlib.suppress(OSError):
                if identity(os.stat(path, follow_symlinks=False))[:2] == created:
                    os.unlink(path)
            raise

    def _rename(self, path: str, to: str, created: tuple[int, ...]) -> None:
        """Give the file `created` its name."""
        del created
        os.replace(path, to)

    def _open_new(self, key: str, path: str) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            if not os.path.isdir(self.url):
                raise StorageError(
                    f"cannot create {key!r} in {self.url}: that folder is not there (prepare() makes it)."
                ) from None
        make_folders(os.path.dirname(path))
        return os.open(path, flags, 0o666)

    def _fill(self, key: str, descriptor: int, buffers: Iterable[memoryview], size: int) -> None:
        def write_batch(batch: Sequence[memoryview], offset: int) -> None:
            # Here and not around the loop: what the buffers themselves raise is not this file's failure.
            with self._translating("write", key):
                write_fully(descriptor, batch, offset)

        helpers = self._write_threads if size >= _PARALLEL_FROM_BYTES else 0
        where = f"cannot write {key!r} in {self.url}"
        block = self._block_bytes if helpers else min(self._block_bytes, _CACHED_BYTES)
        write_buffers(buffers, write_batch, size=size, block_bytes=block, helpers=helpers, where=where)
        with self._translating("write", key):
            os.fsync(descriptor)
