"""Files of a POSIX system, made durable and moved in large blocks: what backends on mounted folders share."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import queue
import stat
import sys
import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Final

from hpdcp._base.backend import ByteRange, as_bytes
from hpdcp._base.errors import InvalidArgumentError

IOV_MAX: Final = 1024
"""Buffers per system call; Linux's limit, and more would not be faster."""

_SYNC_FILE_RANGE_WRITE: Final = 2

ReadTask = tuple[list[memoryview], int]
"""Buffers to fill, one after the other, from an offset of a file."""

WriteBatch = Callable[[Sequence[memoryview], int], None]
"""Writes buffers, one after the other, at an offset."""


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


def read_file(path: str) -> tuple[bytes, int]:
    """All bytes of the file, and how many it had when it was opened: more, if it was cut off meanwhile."""
    file = OpenFile(path)
    try:
        pieces: list[bytes] = []
        missing = file.size
        while missing and (piece := os.read(file.descriptor, missing)):
            pieces.append(piece)
            missing -= len(piece)
    finally:
        file.close()
    return b"".join(pieces), file.size


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


def write_buffers(
    buffers: Iterable[memoryview], write_batch: WriteBatch, *, size: int, block_bytes: int, helpers: int, where: str
) -> None:
    """Hand the buffers to `write_batch` in batches of about `block_bytes`, from `helpers` threads (0: from this one).

    The buffers are iterated in this thread, so that its work on the next ones (checksums, copies from a device) goes
    on while helpers write. Unwritten when the next buffer is asked for: less than (2 * helpers + 1) * block_bytes.

    Raises what `buffers` or `write_batch` raise, and InvalidArgumentError naming `where` when they make another total
    than `size`; never writes past `size`. No helper is running when it returns or raises.
    """
    batches = _batches(buffers, size, block_bytes, where)
    tasks: queue.SimpleQueue[tuple[list[memoryview], int, threading.Event] | None] = queue.SimpleQueue()
    failures: list[BaseException] = []

    def help_writing() -> None:
        while (task := tasks.get()) is not None:
            batch, offset, done = task
            try:
                if not failures:
                    write_batch(batch, offset)
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                failures.append(error)
            done.set()

    threads = started([help_writing] * helpers)
    if not threads:
        for batch, offset in batches:
            write_batch(batch, offset)
        return
    unwritten: deque[threading.Event] = deque()
    try:
        for batch, offset in batches:
            # The oldest one is waited for, and not any: what is unwritten is then always what was handed out last.
            if len(unwritten) == 2 * helpers:
                unwritten.popleft().wait()
            if failures:
                break
            unwritten.append(threading.Event())
            tasks.put((batch, offset, unwritten[-1]))
    finally:
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def started(works: Sequence[Callable[[], None]]) -> list[threading.Thread]:
    """A thread at each of `works`, in order; fewer where the system or an ending interpreter gives no more."""
    threads: list[threading.Thread] = []
    for work in works:
        thread = threading.Thread(target=work, name="hpdcp-io")
        try:
            thread.start()
        except RuntimeError:
            break
        threads.append(thread)
    return threads


def _batches(
    buffers: Iterable[memoryview], size: int, block_bytes: int, where: str
) -> Iterator[tuple[list[memoryview], int]]:
    """The buffers as (batch, offset): small ones together, large ones in pieces, and `size` bytes in all."""
    batch: list[memoryview] = []
    offset = held = 0
    for buffer in buffers:
        view = as_bytes(buffer)
        if offset + held + len(view) > size:
            raise InvalidArgumentError(f"{where}: the buffers hold more than the {size} bytes that were announced.")
        while held + len(view) >= block_bytes:
            room = block_bytes - held
            batch.append(view[:room])
            yield batch, offset
            batch, held, offset = [], 0, offset + block_bytes
            view = view[room:]
        if len(view):
            batch.append(view)
            held += len(view)
            if len(batch) == IOV_MAX:
                yield batch, offset
                batch, held, offset = [], 0, offset + held
    if offset + held != size:
        raise InvalidArgumentError(f"{where}: the buffers hold {offset + held} bytes, but {size} were announced.")
    if batch:
        yield batch, offset


def read_tasks(ranges: Sequence[ByteRange], views: Sequence[memoryview], *, block_bytes: int) -> list[ReadTask]:
    """What to read, in the order of the file: ranges that touch in the file together, large ones in pieces."""
    wanted = [(range_.offset, view) for range_, view in zip(ranges, views, strict=True) if range_.length]
    wanted.sort(key=itemgetter(0))
    tasks: list[ReadTask] = []
    batch: list[memoryview] = []
    start = end = 0
    for offset, view in wanted:
        length = len(view)
        if offset != end or end + length - start > block_bytes or len(batch) == IOV_MAX:
            if batch:
                tasks.append((batch, start))
            batch = []
            start = offset
            while length > block_bytes:
                tasks.append(([view[:block_bytes]], start))
                view = view[block_bytes:]
                length -= block_bytes
                start += block_bytes
            end = start
        batch.append(view)
        end += length
    if batch:
        tasks.append((batch, start))
    return tasks


def run_tasks(tasks: Sequence[ReadTask], run: Callable[[list[memoryview], int], None], *, threads: int) -> None:
    """Call `run` on every task, from `threads` threads, this one among them; a failure ends all and is raised.

    Each thread gets one stretch of the file, about as long as the others': taking turns at the blocks would look
    random to the system's read-ahead (cold: 1.3 instead of 1.6 GB/s with two threads).
    """
    failures: list[BaseException] = []

    def work(share: Sequence[ReadTask]) -> None:
        try:
            for buffers, offset in share:
                if failures:
                    return
                run(buffers, offset)
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            failures.append(error)

    own, *others = _shares(tasks, threads)
    waiting = [partial(work, share) for share in others]
    helpers = started(waiting)
    work(own)
    for rest in waiting[len(helpers) :]:
        rest()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def _shares(tasks: Sequence[ReadTask], count: int) -> list[Sequence[ReadTask]]:
    """The tasks in `count` stretches of about the same number of bytes; at least one, and none but the first empty."""
    ends = list(accumulate(sum(map(len, buffers)) for buffers, _ in tasks))
    total = ends[-1] if ends else 0
    cuts = [bisect_left(ends, total * number / count) + 1 for number in range(1, count)]
    shares = [tasks[start:stop] for start, stop in pairwise([0, *cuts, len(tasks)])]
    return [shares[0], *(share for share in shares[1:] if share)]


def file_size(path: str) -> int:
    """Bytes of the file now; OSError when it is not there or not a file."""
    status = os.stat(path)
    _require_file(status, path)
    return status.st_size


def _require_file(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


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
