"""Ranges of a key's bytes, and the requests that fetch them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from hpdcp._base.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `offset` to `offset + length` of a key."""

    offset: int
    length: int

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Fetch:
    """One request for bytes of a key, and where they go."""

    range: ByteRange
    parts: tuple[tuple[int, memoryview], ...]
    """(offset within the range, buffer to fill from there on); together they may leave bytes of the range unused."""

    @property
    def target(self) -> memoryview | None:
        """The one buffer that takes the whole range; None where the bytes go through memory of the request's own."""
        (_, view), *others = self.parts
        return view if not others and len(view) == self.range.length else None

    def scatter(self, data: memoryview) -> None:
        """Copy `data`, the bytes of the whole range, to where they go."""
        for start, view in self.parts:
            view[:] = data[start : start + len(view)]


def checked_buffers(key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> list[memoryview]:
    """The buffers of `into` as writable bytes, one per range and as long; else InvalidArgumentError."""
    if len(ranges) != len(into):
        raise InvalidArgumentError(f"key {key!r}: {len(ranges)} ranges, but {len(into)} buffers to read them into.")
    for range_, buffer in zip(ranges, into, strict=True):
        if range_.offset < 0 or range_.length != buffer.nbytes:
            raise InvalidArgumentError(
                f"key {key!r}: {range_} is to be read into a buffer of {buffer.nbytes} bytes; "
                "expected a buffer as long as the range, and an offset from 0."
            )
        if buffer.readonly:
            raise InvalidArgumentError(f"key {key!r}: the buffer for {range_} is read-only.")
    return [as_bytes(buffer) for buffer in into]


_view_of: Final[Callable[[int, int, int], memoryview]] = ctypes.pythonapi.PyMemoryView_FromMemory
ctypes.pythonapi.PyMemoryView_FromMemory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
ctypes.pythonapi.PyMemoryView_FromMemory.restype = ctypes.py_object
_WRITABLE: Final = 0x200
"""Python's PyBUF_WRITE."""


def memory_view(address: int, length: int) -> memoryview:
    """Memory of this process as writable bytes; whoever asks knows that it is there, and keeps it while it is used."""
    return _view_of(address, length, _WRITABLE)


def as_bytes(buffer: memoryview) -> memoryview:
    """The same memory as a one-dimensional view of bytes; InvalidArgumentError unless it is C-contiguous."""
    if buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
        return buffer
    if not buffer.c_contiguous:
        raise InvalidArgumentError("a buffer to read into or to write from is not C-contiguous.")
    # cast() refuses shapes with a zero in them.
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())


_SMALL_GAP: Final = 32 << 10
"""Bytes that no request is worth saving: a store across a network sends them in the time it takes to answer."""
_MOST_WASTE: Final = 10
"""Wanted bytes for each byte of larger gaps: a reader of one eighth of every tensor must not read half of them."""


def fetches(ranges: Sequence[ByteRange], into: Sequence[memoryview], *, gap: int, most_bytes: int) -> list[Fetch]:
    """The requests that fill `into` (as `checked_buffers` gives them) from a key, in the order of the key.

    Ranges that overlap, touch or lie at most `gap` bytes apart share a request of up to `most_bytes`, as long as the
    gaps are small or a tenth of what is wanted. A range longer than `most_bytes` becomes several requests of about
    one length.

    >>> target = memoryview(bytearray(30))
    >>> near = fetches([ByteRange(0, 10), ByteRange(12, 20)], [target[:10], target[10:]], gap=2, most_bytes=64)
    >>> [fetch.range for fetch in near]
    [ByteRange(offset=0, length=32)]
    """
    pieces: list[tuple[int, memoryview]] = []
    for range_, view in zip(ranges, into, strict=True):
        count = -(-range_.length // most_bytes)
        step = -(-range_.length // count) if count else 0
        pieces += [(range_.offset + at, view[at : at + step]) for at in range(0, range_.length, step or 1)]
    pieces.sort(key=itemgetter(0))
    found: list[Fetch] = []
    parts: list[tuple[int, memoryview]] = []
    start = stop = wanted = wasted = 0
    for offset, view in pieces:
        hole = max(0, offset - stop)
        end = max(stop, offset + len(view))
        near = hole <= _SMALL_GAP or (wasted + hole) * _MOST_WASTE <= wanted + len(view)
        if parts and (hole > gap or end - start > most_bytes or not near):
            found.append(Fetch(ByteRange(start, stop - start), tuple(parts)))
            parts = []
        if not parts:
            start, end, hole, wanted, wasted = offset, offset + len(view), 0, 0, 0
            stop = offset
        parts.append((offset - start, view))
        wanted += max(0, end - max(stop, offset))
        wasted += hole
        stop = end
    if parts:
        found.append(Fetch(ByteRange(start, stop - start), tuple(parts)))
    return found
