"""Folders of a network file system, which other hosts change at the same time.

What was measured on two Linux clients of one server (kernel 6.1, default mount options), and what follows:

- A name that a client looked up in vain stayed invisible to it for 22 s, and over NFS 4.2 an `open()` of a name that
  was replaced gave the old file for up to 30 s: names are trusted until the folder's attributes expire. Opening the
  folder itself makes the client ask the server (0.1 ms), and the next `open()` is right. So each look at a name opens
  its folder first, and one that finds nothing walks down from the root and lists the folder.
- NFS 3 knows a changed folder by its time of change, in steps of the server's clock (4 to 10 ms on Linux before 6.13):
  of names created within the same step as a look, 34 of 40 were not in the next listing, and would not have been in
  any later one until something else in the folder changed. So listings are fetched anew until the folder has been
  quiet for longer than such a step. What is left: a file or folder that somebody else moves aside, and another in its
  place, within one such step of this look, may be read as it was; hpdcp moves files only onto those they replace.
- A descriptor that is kept open goes on reading what was replaced, or fails once the server has forgotten the file
  (ESTALE). So none is kept, and a read that meets it starts over.
- Errors of writing come with `fsync` and `close`; a full disk only there.
- A client renames a file that is deleted while it is open there to `.nfs…`, until it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Final, TypeVar

from hpdcp._base.backend import Backend, spare_cores
from hpdcp._base.mounts import has_local_locks
from hpdcp_backends._posix.backend import PosixBackend
from hpdcp_backends._posix.open_files import OpenFile, identity

T = TypeVar("T")

_DELETED_WHILE_OPEN: Final = re.compile(r"\.nfs[0-9a-f]{16,}")
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PAUSES: Final = (0.0, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2)
"""Seconds before each further try at what other clients are changing."""

_STEP_SECONDS: Final = 2.0
"""More than a step of any server's clock: a second on the oldest file systems."""

_MOST_FOLDERS: Final = 256


class NfsBackend(PosixBackend):
    """A folder of a network file system, given as a path or as `file://` and a path.

    What another client has written is seen at once. Nothing is mapped, since a mapped file that somebody replaces or
    truncates is a bus error, and nothing stays open between calls.

    Args:
        url: The folder; `~` is expanded, and a relative path is resolved at once.
        storage_options: Nothing; how the server is reached is the mount's business, and one that is given is refused.
        write_threads: Threads that write while the calling one prepares the next buffers; 0 writes in the calling one.
            More than one gain nothing: a client lets one thread at a time write a file, and sends what was written in
            the background.
        read_threads: Threads that read one `read_ranges` together; each keeps requests of its own on the way, so that
            there may be more of them than cores: by default twice as many, from 4 to 16.
        block_bytes: Bytes per system call; the client cuts them into requests of the mount's `rsize` and `wsize`.
        max_concurrent_reads: As in `Backend`.
    """

    name: ClassVar[str] = "nfs"
    remote: ClassVar[bool] = True
    shares_page_cache: ClassVar[bool] = True

    # A round trip of 0.2 to 1 ms is worth a megabyte on the way.
    coalesce_gap = 1 << 20
    max_read_bytes = 64 << 20

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, object] | None = None,
        write_threads: int = 1,
        read_threads: int | None = None,
        block_bytes: int = 8 << 20,
        max_concurrent_reads: int = Backend.max_concurrent_reads,
    ) -> None:
        super().__init__(
            url,
            storage_options=storage_options,
            write_threads=write_threads,
            read_threads=max(4, min(16, 2 * spare_cores())) if read_threads is None else read_threads,
            block_bytes=block_bytes,
            max_concurrent_reads=max_concurrent_reads,
        )
        self._quiet = _QuietFolders()
        self._arrived = False
        self._locks_are_local: bool | None = None

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[OpenFile]:
        file = OpenFile(path)
        try:
            yield file
        finally:
            file.close()

    @property
    def conditional_publish(self) -> bool:
        if self._locks_are_local is None:
            self._locks_are_local = has_local_locks(self.url)
        return super().conditional_publish and not self._locks_are_local

    @contextlib.contextmanager
    def _entries(self, folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        descriptor = os.open(folder, _FOLDER)
        try:
            listed = time.monotonic()
            changed = os.fstat(descriptor).st_ctime_ns
            if not self._quiet.trusted(folder, changed):
                _forget_names(descriptor)
            with os.scandir(descriptor) as entries:
                yield entries
            self._quiet.listed(folder, changed, listed)
        finally:
            os.close(descriptor)

    def _looking_up(self, path: str, look: Callable[[], T]) -> T:
        if not self._arrived:
            # Another host may have made, or moved, folders above the root; once is enough for one checkpoint.
            for folder in _and_above(self.url):
                _revalidate(folder)
            self._arrived = True
        _revalidate(os.path.dirname(path))
        for pause in _PAUSES:
            try:
                return look()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                there = _look_again(path)
                if error.errno == errno.ENOENT and not there:
                    raise
            time.sleep(pause)
        return look()

    def _open_new(self, key: str, path: str) -> int:
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            _look_again(folder)
        return super()._open_new(key, path)

    def _rename(self, path: str, to: str, created: tuple[int, ...]) -> None:
        try:
            super()._rename(path, to, created)
        except FileNotFoundError:
            # A server that was restarted before its answer got through is asked again, and finds the work done.
            if identity(os.stat(to, follow_symlinks=False))[:2] != created:
                raise

    def _remove_empty(self, folder: str) -> bool:
        removed = super()._remove_empty(folder)
        for pause in _PAUSES:
            if removed or not _only_deleted_files(folder):
                break
            time.sleep(pause)
            removed = super()._remove_empty(folder)
        return removed

    def _can_be_key(self, name: str) -> bool:
        return super()._can_be_key(name) and _DELETED_WHILE_OPEN.fullmatch(name.rpartition("/")[2]) is None


class _QuietFolders:
    """Folders whose listing, as the client has it, must be whole: they had been quiet for a while when it was fetched.

    A change after that gets a later time. Clocks are not compared: the folder's time was first seen here some seconds
    before it was listed, and it is still the same.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float, bool]] = {}
        """By folder: its time of change, when that was first seen, and whether a listing came long enough after."""

    def trusted(self, folder: str, changed: int) -> bool:
        seen = self._seen.get(folder)
        return seen is not None and seen[0] == changed and seen[2]

    def listed(self, folder: str, changed: int, when: float) -> None:
        """The folder was listed whole after `when`; its time of change was `changed` before that."""
        seen = self._seen.get(folder)
        first = seen[1] if seen is not None and seen[0] == changed else when
        if len(self._seen) >= _MOST_FOLDERS:
            self._seen.clear()
        self._seen[folder] = (changed, first, when - first > _STEP_SECONDS)


def _and_above(folder: str) -> list[str]:
    """The folders from the root down to this one."""
    parts = folder.strip("/").split("/")
    return ["/", *("/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1))]


def _revalidate(folder: str) -> None:
    """Make the client ask the server whether the folder has changed, and so which of its names are still good."""
    # Where that is not allowed, or there is none, what is done next will tell.
    with contextlib.suppress(OSError):
        os.close(os.open(folder, _FOLDER))


def _forget_names(descriptor: int) -> None:
    """Drop what the client has kept of the folder's listing."""
    # Some file systems have no such thing to drop.
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _look_again(path: str) -> bool:
    """Whether the path is there, as the server says at each folder on the way down; what is there can be opened."""
    folder = "/"
    for name in path.strip("/").split("/"):
        _revalidate(folder)
        below = os.path.join(folder, name)
        # A listing that is fetched anew also corrects what the client believed of single names.
        if not _exists(below) and (name not in _fetched_names(folder) or not _exists(below)):
            return False
        folder = below
    return True


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ESTALE)
    return True


def _fetched_names(folder: str) -> list[str]:
    try:
        descriptor = os.open(folder, _FOLDER)
    except OSError:
        return []
    try:
        _forget_names(descriptor)
        return os.listdir(descriptor)
    except OSError:
        return []
    finally:
        os.close(descriptor)


def _only_deleted_files(folder: str) -> bool:
    """Whether the folder holds nothing but deleted files that somebody on this host has not closed yet."""
    names = _fetched_names(folder)
    return bool(names) and all(_DELETED_WHILE_OPEN.fullmatch(name) for name in names)
