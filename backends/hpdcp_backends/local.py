"""Folders of a local disk or memory file system."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

from hpdcp._base.backend import ByteRange, spare_cores
from hpdcp._base.errors import InvalidArgumentError
from hpdcp_backends._posix.backend import PosixBackend
from hpdcp_backends._posix.open_files import OpenFile, OpenFiles, map_private
from hpdcp_backends._tunables import at_least


class LocalBackend(PosixBackend):
    """A folder of this host, given as a path or as `file://` and a path.

    Args:
        url: The folder; `~` is expanded, and a relative path is resolved at once.
        storage_options: Nothing; a local folder has no options, and one that is given is refused.
        write_threads: Threads that write while the calling one prepares the next buffers; 0 writes in the calling
            one. One by default where a core is free for it: file systems that let only one thread write a file at a
            time (ext4, xfs, tmpfs) gain nothing from more.
        read_threads: Threads that read one `read_ranges` together; by default as many as there are spare cores, four
            at most.
        block_bytes: Bytes per system call.
        max_open_files: Files kept open between reads.
        max_concurrent_reads: As in `Backend`.
    """

    name: ClassVar[str] = "local"
    remote: ClassVar[bool] = False
    shares_page_cache: ClassVar[bool] = True

    coalesce_gap = 16 << 10
    max_read_bytes = 64 << 20

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, object] | None = None,
        write_threads: int | None = None,
        read_threads: int | None = None,
        block_bytes: int = 8 << 20,
        max_open_files: int = 8,
        max_concurrent_reads: int = 1,
    ) -> None:
        cores = spare_cores()
        super().__init__(
            url,
            storage_options=storage_options,
            write_threads=min(1, cores - 1) if write_threads is None else write_threads,
            read_threads=min(4, cores) if read_threads is None else read_threads,
            block_bytes=block_bytes,
            max_concurrent_reads=max_concurrent_reads,
        )
        at_least("max_open_files", max_open_files, 1)
        self._files = OpenFiles(max_open_files)

    def map_range(self, key: str, range_: ByteRange) -> memoryview:
        """As `Backend.map_range`; the system is asked to read the range ahead.

        A file that somebody truncates in place afterwards ends the process when the lost bytes are touched (SIGBUS);
        hpdcp itself only ever replaces files.
        """
        path = self._path(key)
        if range_.offset < 0 or range_.length < 0:
            raise InvalidArgumentError(f"key {key!r}: {range_} is no range; expected an offset and a length from 0.")
        with self._translating("map", key), self._files.use(path) as file:
            self._check_size(key, [range_], file.size)
            if range_.length == 0:
                return memoryview(b"")
            mapping = file.map()
            start = range_.offset // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, start, range_.stop - start)
            return memoryview(mapping)[range_.offset : range_.stop]

    def map_private(self, key: str) -> memoryview:
        """As `Backend.map_private`; truncation in place is as fatal as in `map_range`."""
        path = self._path(key)
        with self._translating("map", key), self._files.use(path) as file:
            return map_private(file.descriptor, file.size)

    def close(self) -> None:
        self._files.close()

    def _opened(self, path: str) -> AbstractContextManager[OpenFile]:
        return self._files.use(path)

    def _forget(self, path: str) -> None:
        self._files.forget(path)
