"""Whether the bytes of a checkpoint's files are those that were saved, file by file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError, InvalidArgumentError, NotSupportedError
from hpdcp._files import registry
from hpdcp._files.layout import Layout
from hpdcp._format.checksums import HEAD_BYTES, block_span, checksum, head_mark
from hpdcp._format.columns import starts_of
from hpdcp._format.metadata import Metadata

_WINDOW_BYTES: Final = 32 << 20
"""Most bytes that one request reads; as many are held per thread."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was committed."""

    key: str
    """The file."""
    problem: str
    fqn: str = ""
    """The name whose bytes it concerns, where it is one."""
    offset: int | None = None
    """First byte in the file, where the problem is a block of bytes."""
    length: int | None = None


@dataclass(slots=True)
class FileResult:
    """What was found of one file, or of several together."""

    damages: list[Damage] = field(default_factory=list)
    nbytes: int = 0
    """Bytes of tensors and values that are intact."""
    blocks: int = 0
    """Checksums that fit."""

    def add(self, other: FileResult) -> None:
        """Count what was found of another file as well."""
        self.damages += other.damages
        self.nbytes += other.nbytes
        self.blocks += other.blocks


@dataclass(frozen=True, slots=True)
class _Block:
    row: int
    """Of `Metadata.chunks`."""
    start: int
    """First byte in the file."""
    stop: int
    checksum: int


class FileVerifier:
    """Compares the files of one checkpoint with what its metadata records of them; several threads may."""

    def __init__(self, backend: Backend, metadata: Metadata) -> None:
        self._backend = backend
        self._metadata = metadata
        layout = layout_of(metadata)
        self._layout = None if layout is None else layout()
        self._lock = threading.Lock()
        self.compared = 0
        """Bytes found intact so far, by all threads."""
        self._fqns = metadata.entries.fqns
        storage = metadata.storage
        self._in_file_order = np.lexsort((storage.offset, storage.file))
        self._first = np.searchsorted(storage.file[self._in_file_order], np.arange(len(storage.file_names) + 1))
        self._crc_starts = starts_of(storage.crc_ends)

    def check_file(self, file: int) -> FileResult:
        """Read the file with that number in the metadata, and compare all that is recorded of it."""
        storage = self._metadata.storage
        key, expected = storage.file_names[file], int(storage.file_sizes[file])
        result = FileResult()
        try:
            size = self._backend.size(key)
        except FileNotFoundError:
            result.damages.append(Damage(key, "is missing"))
            return result
        if size != expected:
            result.damages.append(Damage(key, f"is {size} bytes long, recorded were {expected}"))
        rows = self._in_file_order[self._first[file] : self._first[file + 1]].tolist()
        if self._layout is not None and self._layout.checks_extents:
            self._check_extents(self._layout, key, rows, result)
            return result
        self._check_head(key, size, file, rows, result)
        memory = memoryview(bytearray(min(size, _WINDOW_BYTES)))
        for window in self._windows(rows):
            self._check_window(key, size, window, memory, result)
        return result

    def _check_extents(self, layout: Layout, key: str, rows: Sequence[int], result: FileResult) -> None:
        for row in rows:
            storage = self._metadata.storage
            offset, length = int(storage.offset[row]), int(storage.length[row])
            try:
                result.blocks += layout.check_extent(self._backend, self._metadata, row)
            except CorruptCheckpointError as error:
                result.damages.append(Damage(key, str(error), self._name(row), offset, length))
                continue
            result.nbytes += length
            with self._lock:
                self.compared += length

    def _check_head(self, key: str, size: int, file: int, rows: Sequence[int], result: FileResult) -> None:
        head = bytearray(min(size, HEAD_BYTES))
        self._backend.read_ranges(key, [ByteRange(0, len(head))], [memoryview(head)])
        if head_mark(head) != int(self._metadata.storage.file_marks[file]):
            result.damages.append(
                Damage(
                    key, "does not begin as the file that was committed: damaged, or another save's", "", 0, len(head)
                )
            )
        elif self._layout is not None:
            try:
                described = self._layout.described_extents(self._backend, key, size)
            except CorruptCheckpointError as error:
                result.damages.append(Damage(key, str(error)))
                return
            if described is None:
                return
            storage = self._metadata.storage
            for row in rows:
                if (int(storage.offset[row]), int(storage.length[row])) not in described:
                    result.damages.append(
                        Damage(key, "its header lacks what is recorded for this name", self._name(row))
                    )

    def _windows(self, rows: Sequence[int]) -> Iterator[list[_Block]]:
        """Blocks that lie close enough together to be read in one request."""
        window: list[_Block] = []
        for row in rows:
            for block in self._blocks(row):
                if window and block.stop - window[0].start > _WINDOW_BYTES:
                    yield window
                    window = []
                window.append(block)
        if window:
            yield window

    def _blocks(self, row: int) -> Iterator[_Block]:
        storage = self._metadata.storage
        begin, length = int(storage.offset[row]), int(storage.length[row])
        checksums = storage.crcs[self._crc_starts[row] : storage.crc_ends[row]].tolist()
        for number, recorded in enumerate(checksums):
            low, high = block_span(number, length)
            yield _Block(row, begin + low, begin + high, recorded)

    def _check_window(
        self, key: str, size: int, window: Sequence[_Block], memory: memoryview, result: FileResult
    ) -> None:
        start = window[0].start
        stop = min(max(block.stop for block in window), size)
        if stop > start:
            self._backend.read_ranges(key, [ByteRange(start, stop - start)], [memory[: stop - start]])
        before = result.nbytes
        for block in window:
            if block.stop > size:
                problem = "the file ends before it does"
            elif checksum(memory[block.start - start : block.stop - start]) != block.checksum:
                problem = "its checksum differs"
            else:
                result.nbytes += block.stop - block.start
                result.blocks += 1
                continue
            result.damages.append(Damage(key, problem, self._name(block.row), block.start, block.stop - block.start))
        with self._lock:
            self.compared += result.nbytes - before

    def _name(self, row: int) -> str:
        return self._fqns[int(self._metadata.chunks.entry[row])]


def layout_of(metadata: Metadata) -> type[Layout] | None:
    """None where the package that brings it is not there: checksums can be compared all the same."""
    with contextlib.suppress(InvalidArgumentError, NotSupportedError):
        return registry.find_layout(metadata.settings.get("layout", "safetensors"))
    return None
