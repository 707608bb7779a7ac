"""Whether a checkpoint's bytes are those that were saved: the data behind `hpdcp verify`; prints nothing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError, InvalidArgumentError, NotSupportedError
from hpdcp._files import registry
from hpdcp._files.layout import Layout
from hpdcp._files.lease import read_lease
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.checksums import HEAD_BYTES, block_span, checksum, head_mark
from hpdcp._format.columns import starts_of
from hpdcp._format.file_names import is_data_key, rank_of_metadata_key
from hpdcp._format.metadata import Metadata
from hpdcp._manage._opening import FoundMetadata, open_checkpoint

_WINDOW_BYTES: Final = 32 << 20
"""Most bytes that one request reads; as many are held per thread."""
_THREADS: Final = 4
_PROGRESS_SECONDS: Final = 0.1
"""Between two calls of `on_progress` while no file ends: one file may be all there is."""


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


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify_checkpoint` found."""

    url: str
    files: int
    nbytes: int
    """Bytes of tensors and values that were read and compared."""
    blocks: int
    """Checksums compared."""
    seconds: float
    damages: tuple[Damage, ...] = ()
    """Empty for a sound checkpoint; by file and offset."""
    orphans: tuple[str, ...] = ()
    """Files that a save left here and that this checkpoint does not use; harmless, and removed by a later save."""

    @property
    def is_sound(self) -> bool:
        """Whether every byte that was saved is there, unchanged."""
        return not self.damages


def verify_checkpoint(
    checkpoint_id: str | Path,
    *,
    reader: FileSystemReader | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Read every stored byte and compare it with its checksum; nothing is changed.

    Checks of each data file that it is there, as long as recorded, begins as it was committed, and says in its header
    where its contents lie; and of each block of each tensor and value that its checksum fits. Damage is reported, not
    raised.

    Args:
        checkpoint_id: folder or URL.
        reader: in place of the configured one.
        on_progress: called with (bytes compared so far, bytes in all), from the calling thread.

    Raises:
        NotSupportedError: files of another origin, without checksums.
        CheckpointError, StorageError: the metadata cannot be read, or the store fails in another way than by lacking
            a file.
    """
    began = time.perf_counter()
    with open_checkpoint(checkpoint_id, reader) as (backend, found):
        metadata = found.metadata
        if not metadata.has_checksums:
            raise NotSupportedError(
                f"{backend.url} records no checksums to compare its bytes with. `hpdcp inspect` shows that its headers "
                "fit its files; for more, save it with hpdcp."
            )
        total = int(metadata.storage.length.sum())
        work = _Verification(backend, metadata)
        damages: list[Damage] = []
        nbytes = blocks = 0
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "hpdcp-verify") as pool:
            waiting = {pool.submit(work.check_file, file) for file in range(len(metadata.storage.file_names))}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=_PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
                    for result in (future.result() for future in done):
                        damages += result.damages
                        nbytes, blocks = nbytes + result.nbytes, blocks + result.blocks
                    if on_progress is not None:
                        on_progress(work.compared if waiting else nbytes, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return VerifyReport(
            url=backend.url,
            files=len(metadata.storage.file_names),
            nbytes=nbytes,
            blocks=blocks,
            seconds=time.perf_counter() - began,
            damages=tuple(sorted(damages, key=lambda damage: (damage.key, damage.offset or 0))),
            orphans=tuple(_orphans(backend, found)),
        )


@dataclass(slots=True)
class _FileResult:
    damages: list[Damage] = field(default_factory=list)
    nbytes: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Block:
    row: int
    """Of `Metadata.chunks`."""
    start: int
    """First byte in the file."""
    stop: int
    checksum: int


class _Verification:
    def __init__(self, backend: Backend, metadata: Metadata) -> None:
        self._backend = backend
        self._metadata = metadata
        self._layout = _layout_of(metadata)
        self._lock = threading.Lock()
        self.compared = 0
        """Bytes found intact so far, by all threads."""
        self._fqns = metadata.entries.fqns
        storage = metadata.storage
        self._in_file_order = np.lexsort((storage.offset, storage.file))
        self._first = np.searchsorted(storage.file[self._in_file_order], np.arange(len(storage.file_names) + 1))
        self._crc_starts = starts_of(storage.crc_ends)

    def check_file(self, file: int) -> _FileResult:
        storage = self._metadata.storage
        key, expected = storage.file_names[file], int(storage.file_sizes[file])
        result = _FileResult()
        try:
            size = self._backend.size(key)
        except FileNotFoundError:
            result.damages.append(Damage(key, "is missing"))
            return result
        if size != expected:
            result.damages.append(Damage(key, f"is {size} bytes long, recorded were {expected}"))
        rows = self._in_file_order[self._first[file] : self._first[file + 1]].tolist()
        self._check_head(key, size, file, rows, result)
        memory = memoryview(bytearray(min(size, _WINDOW_BYTES)))
        for window in self._windows(rows):
            self._check_window(key, size, window, memory, result)
        return result

    def _check_head(self, key: str, size: int, file: int, rows: Sequence[int], result: _FileResult) -> None:
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
        self, key: str, size: int, window: Sequence[_Block], memory: memoryview, result: _FileResult
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


def _layout_of(metadata: Metadata) -> type[Layout] | None:
    """None where the package that brings it is not there: checksums can be compared all the same."""
    with contextlib.suppress(InvalidArgumentError, NotSupportedError):
        return registry.find_layout(metadata.settings.get("layout", "safetensors"))
    return None


def _orphans(backend: Backend, found: FoundMetadata) -> Iterator[str]:
    used = set(found.metadata.files)
    lease = read_lease(backend)
    if lease is not None:
        used.update(key for key, _ in lease.replaced)
    for info in backend.list_keys():
        stale = rank_of_metadata_key(info.key) is not None and not found.by_rank
        if stale or (is_data_key(info.key) and info.key not in used):
            yield info.key
