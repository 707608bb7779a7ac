"""Checksums on storage: one crc32c for each block of an extent, and a mark of each file's first bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import crc32c

BLOCK_BYTES: Final = 4 << 20
"""One crc32c covers this many bytes of an extent; the last block of an extent may be shorter."""
HEAD_BYTES: Final = 4096
"""How much of a data file's start its mark covers: enough for the attempt id that its header begins with."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """crc32c of one block's bytes."""
    return crc32c.crc32c(data)


def head_mark(data: bytes | bytearray | memoryview) -> int:
    """The mark of a file that begins with `data`, which holds its first `HEAD_BYTES`, or all of a shorter one."""
    return crc32c.crc32c(memoryview(data)[:HEAD_BYTES])


def block_span(block: int, length: int) -> tuple[int, int]:
    """First byte of a block, and the first one past it, in an extent of `length` bytes.

    >>> block_span(1, BLOCK_BYTES + 10)
    (4194304, 4194314)
    """
    return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, length)


def blocks_between(start: int, stop: int) -> range:
    """The blocks of an extent that bytes `start` to `stop` touch.

    >>> blocks_between(0, 10), blocks_between(BLOCK_BYTES - 1, BLOCK_BYTES + 1)
    (range(0, 1), range(0, 2))
    """
    return range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))


class BlockChecksums:
    """crc32c of each block of an extent that arrives in pieces."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._running = 0
        self._filled = 0

    def add(self, piece: memoryview) -> None:
        """Take the extent's next bytes."""
        position = 0
        while position < len(piece):
            step = min(len(piece) - position, BLOCK_BYTES - self._filled)
            self._running = crc32c.crc32c(piece[position : position + step], self._running)
            self._filled += step
            position += step
            if self._filled == BLOCK_BYTES:
                self._close()

    def finish(self) -> list[int]:
        """The checksums of all blocks; the last one ends where the extent does."""
        if self._filled:
            self._close()
        return self._done

    def _close(self) -> None:
        self._done.append(self._running)
        self._running = self._filled = 0


def block_checksums(pieces: Iterable[memoryview]) -> list[int]:
    """crc32c of each block of what the pieces hold one after another."""
    running = BlockChecksums()
    for piece in pieces:
        running.add(piece)
    return running.finish()


class HeadMark:
    """The mark of a file whose bytes go by in pieces."""

    def __init__(self) -> None:
        self.value = 0
        self._left = HEAD_BYTES

    def add(self, piece: memoryview) -> None:
        """Take the file's next bytes."""
        if self._left:
            taken = piece[: self._left]
            self.value = crc32c.crc32c(taken, self.value)
            self._left -= len(taken)
