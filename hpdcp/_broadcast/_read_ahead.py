"""Units read on threads before their turn to be sent."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Final

from hpdcp._broadcast._unit_memory import UnitMemory
from hpdcp._broadcast._units import Unit

READ_AHEAD: Final = 2
"""Boxes, or batches of them, read before their turn to be sent, beside those that threads are reading."""


class ReadAhead:
    """Reads units on threads, begun in order; `READ_AHEAD` of them are read and wait, one is being read on each thread.

    A unit is begun only when all before it are, so the one that is wanted next is always being read, or is read.
    """

    def __init__(self, units: Sequence[Unit], read: Callable[[Unit], UnitMemory], *, threads: int) -> None:
        self._units = iter(enumerate(units))
        self._read = read
        self._room = threading.Semaphore(READ_AHEAD + threads - 1)
        self._turn = threading.Lock()
        self._done: dict[int, UnitMemory] = {}
        self._changed = threading.Condition()
        self._next = 0
        self._closed = False
        self._threads = [
            # In the caller's context: `config.using` holds for the reader as well.
            threading.Thread(target=contextvars.copy_context().run, args=(self._run,), name="hpdcp-read-ahead")
            for _ in range(min(threads, len(units)))
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> UnitMemory:
        """The next unit, once it is read."""
        with self._changed:
            self._changed.wait_for(lambda: self._next in self._done)
            memory = self._done.pop(self._next)
            self._next += 1
        self._room.release()
        return memory

    def close(self) -> None:
        """Read nothing more, and return when the threads have ended."""
        self._closed = True
        self._room.release(len(self._threads) or 1)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            self._room.acquire()
            with self._turn:
                position, unit = next(self._units, (-1, None))
            if unit is None or self._closed:
                return
            memory = self._read(unit)
            with self._changed:
                self._done[position] = memory
                self._changed.notify_all()
