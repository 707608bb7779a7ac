"""Files open for reading: one version of each, kept open between reads, and mapped."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import stat
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final


def _require_file(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


_MOST_SPARSE: Final = 1 << 10
_SMALL: Final = 64 << 20


def _require_dense(status: os.stat_result, path: str) -> None:
    """A file that is read whole holds what it is long: one that is nearly all hole takes no disk, and all of memory."""
    if status.st_size > _SMALL and status.st_blocks * 512 < status.st_size // _MOST_SPARSE:
        raise OSError(errno.EFBIG, "nearly all of the file is a hole, which nothing of hpdcp leaves", path)


class OpenFile:
    """One version of a file, open for reading."""

    __slots__ = ("_map", "descriptor", "forgotten", "identity", "size", "users")

    def __init__(self, path: str) -> None:
        # O_NONBLOCK means nothing to files, but keeps a pipe of that name from blocking the open.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self.descriptor)
            _require_file(status, path)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.size = status.st_size
        self.identity = identity(status)
        self.users = 0
        self.forgotten = False
        self._map: mmap.mmap | None = None

    def map(self) -> mmap.mmap:
        """All of it, mapped; views of the mapping keep it alive after `close`."""
        if self._map is None:
            self._map = mmap.mmap(self.descriptor, self.size, access=mmap.ACCESS_READ)
        return self._map

    def close(self) -> None:
        # Dropping the mapping unmaps it unless somebody still looks at it; closing it would raise then.
        self._map = None
        os.close(self.descriptor)


def read_file(path: str) -> tuple[bytes, int]:
    """All bytes of the file, and how many it had when it was opened: more, if it was cut off meanwhile."""
    file = OpenFile(path)
    try:
        _require_dense(os.fstat(file.descriptor), path)
        pieces: list[bytes] = []
        missing = file.size
        while missing and (piece := os.read(file.descriptor, missing)):
            pieces.append(piece)
            missing -= len(piece)
    finally:
        file.close()
    return b"".join(pieces), file.size


_MAP_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def map_private(descriptor: int, size: int) -> memoryview:
    """The file, writable, each written page copied for this process; unmapped when nobody looks at it any more.

    Not by `mmap.mmap`: that keeps a descriptor for each mapping, and thousands of files may be mapped; and the system
    would refuse to map more than it could copy, though hardly any page ever is.
    """
    if size == 0:
        return memoryview(bytearray())
    library = _memory_library()
    address = library.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE, descriptor, 0
    )
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    block = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(block, library.munmap, address, size).atexit = False
    return memoryview(block).cast("B")


@functools.cache
def _memory_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return library


def identity(status: os.stat_result) -> tuple[int, int, int]:
    """Differs for another file under the same name, and for the same file when its size changed."""
    return status.st_dev, status.st_ino, status.st_size


class OpenFiles:
    """Files kept open for reading, at most `limit` beside those in use; the one unused for longest is closed first.

    Every use looks at the name again (2 µs), so that a file that was replaced is opened anew. After a fork the child
    starts with none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @contextlib.contextmanager
    def use(self, path: str) -> Iterator[OpenFile]:
        """The file at `path` as it is now. Raises OSError when it cannot be opened."""
        if self._pid != os.getpid():
            self._start_over()
        current = identity(os.stat(path))
        with self._lock:
            file = self._files.get(path)
            if file is None or file.identity != current:
                self._forget(path)
                file = self._files[path] = OpenFile(path)
            self._files.move_to_end(path)
            file.users += 1
            while len(self._files) > self._limit:
                self._forget(next(iter(self._files)))
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1
                if file.forgotten and file.users == 0:
                    file.close()

    def forget(self, path: str) -> None:
        """Close the file at `path`, if it is open: the space of one that was deleted is free only then."""
        if self._pid != os.getpid():
            self._start_over()
        with self._lock:
            self._forget(path)

    def close(self) -> None:
        """Close all of them; those in use when their users are done."""
        if self._pid != os.getpid():
            self._start_over()
        with self._lock:
            for path in list(self._files):
                self._forget(path)

    def _forget(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            file.forgotten = True
            if file.users == 0:
                file.close()

    def _start_over(self) -> None:
        # A thread of the parent may have held the lock, or a file, at the moment of the fork.
        inherited = list(self._files.values())
        self._files = OrderedDict()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        for file in inherited:
            file.close()
