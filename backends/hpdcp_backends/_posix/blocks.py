"""Bytes moved in large blocks by several threads: buffers out to a file, and ranges of one into buffers."""

from __future__ import annotations

import queue
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Final

from hpdcp._base.backend import ByteRange, as_bytes
from hpdcp._base.errors import InvalidArgumentError

IOV_MAX: Final = 1024
"""Buffers per system call; Linux's limit, and more would not be faster."""

ReadTask = tuple[list[memoryview], int]
"""Buffers to fill, one after the other, from an offset of a file."""

WriteBatch = Callable[[Sequence[memoryview], int], None]
"""Writes buffers, one after the other, at an offset."""


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
