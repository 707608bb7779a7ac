"""Byte stores for tests, that hpdcp finds by name as it finds those of other packages."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import StorageError
from hpdcp_backends.local import LocalBackend


@dataclass
class Traffic:
    """What this process has read from data files, beside the first bytes, by which a file is recognised."""

    reads: list[tuple[str, ByteRange]] = field(default_factory=list)
    fails: Callable[[str, ByteRange], bool] | None = None
    """Whether this read fails."""

    @property
    def nbytes(self) -> int:
        return sum(range_.length for _, range_ in self.reads)

    def note(self, key: str, ranges: Sequence[ByteRange]) -> None:
        for range_ in ranges:
            if range_.offset == 0:
                continue
            self.reads.append((key, range_))
            if self.fails is not None and self.fails(key, range_):
                raise StorageError(f"cannot read {key!r} at {range_.offset}: the cable is cut")


class CountingBackend(LocalBackend):
    """A folder that says it is far away, reads exactly what it is asked for, and keeps count of it."""

    name: ClassVar[str] = "counting"
    remote: ClassVar[bool] = True
    shares_page_cache: ClassVar[bool] = False
    traffic: ClassVar[Traffic] = Traffic()

    coalesce_gap = 0

    def __init__(self, url: str, *, storage_options: Mapping[str, object] | None = None) -> None:
        super().__init__(url, storage_options=storage_options, max_concurrent_reads=4)

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        self.traffic.note(key, ranges)
        super().read_ranges(key, ranges, into)

    def map_range(self, key: str, range_: ByteRange) -> memoryview | None:  # type: ignore[override]
        return None


class CountingOnThisHostBackend(CountingBackend):
    """The same, but with a page cache that ranks of one host share."""

    name: ClassVar[str] = "counting-here"
    shares_page_cache: ClassVar[bool] = True


class ThrottledBackend(CountingBackend):
    """A folder behind one link of limited speed, which all processes that read from it share."""

    name: ClassVar[str] = "throttled"

    def __init__(
        self, url: str, *, storage_options: Mapping[str, object] | None = None, bytes_per_second: float = 200e6
    ) -> None:
        super().__init__(url, storage_options=storage_options)
        self._rate = bytes_per_second

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        super().read_ranges(key, ranges, into)
        for range_ in ranges:
            for start in range(0, range_.length, _PACKET_BYTES):
                self._wait_for_link(min(_PACKET_BYTES, range_.length - start))

    def _wait_for_link(self, nbytes: int) -> None:
        """Book the link for these bytes, behind everybody who came before, and wait until they are through."""
        descriptor = os.open(f"{self.url}.link", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            booked = os.pread(descriptor, _MOMENT.size, 0)
            free = _MOMENT.unpack(booked)[0] if booked else 0.0
            done = max(free, time.monotonic()) + nbytes / self._rate
            os.pwrite(descriptor, _MOMENT.pack(done), 0)
        finally:
            os.close(descriptor)
        time.sleep(max(0.0, done - time.monotonic()))


_PACKET_BYTES: Final = 4 << 20
_MOMENT: Final = struct.Struct("d")
_KNOWN: Final = (CountingBackend, CountingOnThisHostBackend, ThrottledBackend)


@contextlib.contextmanager
def registered() -> Iterator[Traffic]:
    """Make the stores of this module known to this process, as an installed package would; yields what they count."""
    with tempfile.TemporaryDirectory() as folder:
        about = Path(folder, "hpdcp_test_stores-1.0.dist-info")
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hpdcp-test-stores\nVersion: 1.0\n")
        points = "".join(f"{kind.name} = {__name__}:{kind.__name__}\n" for kind in _KNOWN)
        (about / "entry_points.txt").write_text(f"[hpdcp.backends]\n{points}")
        sys.path.insert(0, folder)
        try:
            yield CountingBackend.traffic
        finally:
            sys.path.remove(folder)
