"""Making blocks ahead of the one that is used, in memory that is used again."""

from __future__ import annotations

import contextlib
import contextvars
import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias, TypeVar

import numpy as np

_AHEAD: Final = 2
"""Blocks that are made ahead of the one that is used."""
_ALIGNMENT: Final = 64

T = TypeVar("T")
_Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


def read_ahead(makers: Iterable[Callable[[], T]], context: contextvars.Context) -> Generator[T, None, None]:
    """What each of `makers` makes, in order; made by a thread of its own, `_AHEAD` of them early."""
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1, "hpdcp-ahead") as pool:
        try:
            for make in makers:
                pending.append(pool.submit(context.run, make))
                if len(pending) > _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


class ReusedMemory:
    """Memory for blocks, used again when nobody holds a view of it any more: fresh memory costs a page fault for every
    4 KiB, 0.4 to 1.3 GB/s where memory that was touched before takes 5 to 6.

    Args:
        block_bytes: what is allocated at least, so that most blocks fit into memory of an earlier one.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        # Atomic by itself: memory comes back at any moment, in any thread, also one that is just taking some.
        self._free: deque[_Bytes] = deque(maxlen=_AHEAD + 2)

    def allocate(self, lengths: Sequence[int]) -> list[memoryview]:
        """Writable memory of each of these lengths."""
        rounded = [math.ceil(length / _ALIGNMENT) * _ALIGNMENT for length in lengths]
        if not rounded:
            return []
        whole = self._lease(sum(rounded)).data
        starts = np.cumsum([0, *rounded]).tolist()
        return [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]

    def _lease(self, nbytes: int) -> _Bytes:
        array = self._taken(nbytes)
        lease = array[:]
        # Every view keeps the lease, so its end is theirs.
        weakref.finalize(lease, self._free.append, array).atexit = False
        return lease

    def _taken(self, nbytes: int) -> _Bytes:
        with contextlib.suppress(IndexError):
            while len(array := self._free.popleft()) < nbytes:
                pass
            return array
        return np.empty(max(nbytes, self._block_bytes), np.uint8)
