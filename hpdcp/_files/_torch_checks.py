"""Whether an item of torch.distributed.checkpoint is as it was written, by the CRCs of its zip archive."""

from __future__ import annotations

import io
import zipfile
from typing import Any, BinaryIO, Final

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._format.metadata import StorageInfo

_BUFFER_BYTES: Final = 4 << 20
"""What is asked for at a time of an item that is read whole."""


def check_records(item: BinaryIO, length: int) -> int:
    """Compare every record of the archive in `item`, of `length` bytes, with its CRC; how many were compared.

    Raises:
        CorruptCheckpointError: says what differs.
    """
    try:
        with zipfile.ZipFile(item) as archive:
            records = archive.infolist()
            for record in records:
                if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                    raise CorruptCheckpointError(f"its record {record.filename!r} is compressed")
            if sum(record.file_size for record in records) > length:
                raise CorruptCheckpointError("its records take more room than it has")
            damaged = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError) as error:
        raise CorruptCheckpointError(f"it is no whole archive ({error})") from None
    if damaged is not None:
        raise CorruptCheckpointError(f"the CRC of its record {damaged!r} differs")
    return len(records)


def open_item(backend: Backend, stored: StorageInfo) -> BinaryIO:
    """The item as a file that is read from the store as far as it is asked for."""
    return io.BufferedReader(_Item(backend, stored), min(_BUFFER_BYTES, max(stored.length, 1)))


class _Item(io.RawIOBase):
    def __init__(self, backend: Backend, stored: StorageInfo) -> None:
        self._backend = backend
        self._stored = stored
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.length}[whence]
        if base + offset < 0:
            raise ValueError(f"there is nothing at {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._stored.length - self._at))
        if count:
            range_ = ByteRange(self._stored.offset + self._at, count)
            self._backend.read_ranges(self._stored.key, [range_], [view[:count]])
        self._at += count
        return count
