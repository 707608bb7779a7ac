"""What a request sends: memory as it lies, in blocks, and its checksum."""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from typing import Final

import crc32c

from hpdcp_backends._s3.errors import StoppedError

_BLOCK_BYTES: Final = 256 << 10
"""Handed to the socket at a time. It has `connect_timeout` to take a block, so that a block bounds the slowest link
that works; larger ones are not faster."""


class Body:
    """Views one after the other, as the file that botocore sends; nothing is copied.

    `read` may return less than asked for, or more in one piece than urllib3's 16 KiB blocks. It raises StoppedError
    once `stop` is set: the connection is closed, and the server drops what it has received.
    """

    def __init__(self, views: Sequence[memoryview], stop: threading.Event) -> None:
        self._views = views
        self._stop = stop
        self._size = sum(len(view) for view in views)
        self.seek(0)

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        position = offset + (0, getattr(self, "_position", 0), self._size)[whence]
        self._index = self._start = 0
        self._position = position
        while self._index < len(self._views) and position >= len(self._views[self._index]):
            position -= len(self._views[self._index])
            self._index += 1
        self._start = position if self._index < len(self._views) else 0
        return self._position

    def read(self, size: int | None = -1) -> memoryview | bytes:
        if self._stop.is_set():
            raise StoppedError
        if size == 0 or self._index == len(self._views):
            return b""
        view = self._views[self._index]
        block = view[self._start : self._start + _BLOCK_BYTES]
        self._start += len(block)
        self._position += len(block)
        while self._index < len(self._views) and self._start >= len(self._views[self._index]):
            self._index += 1
            self._start = 0
        return block

    def crc32c(self) -> str:
        """The CRC-32C of all of it, as S3 writes it."""
        checksum = 0
        for view in self._views:
            checksum = crc32c.crc32c(view, checksum)
        return base64.b64encode(checksum.to_bytes(4, "big")).decode()
