"""The default layout: tensors in safetensors files, Python values in an objects file of the same container.

    _rank0_.<attempt>.safetensors   rank 0's chunks; any safetensors reader opens it
    _rank0_.<attempt>.bytes         rank 0's Python values, one U8 entry each

A file is written from the tensors' own memory: all sizes are known, so its header goes first. The header also says
which box of which global tensor each entry is, so a file explains itself when `.metadata` is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._devices.downloads import Downloads
from hpdcp._files._data_file import DataFile
from hpdcp._files._extents import extents_of
from hpdcp._files.block_checker import BlockChecker
from hpdcp._files.layout import FileNaming, Layout, Verify
from hpdcp._files.parallel import for_each_file
from hpdcp._files.read_engine import read_extents
from hpdcp._files.run_reads import read_tensors
from hpdcp._format.checksums import HEAD_BYTES, head_mark
from hpdcp._format.columns import I64, EntryKind
from hpdcp._format.container import MAX_HEADER_BYTES, PREFIX_BYTES, parse_header
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import PlannedItems, ReadItem
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.read_targets import ReadTargets, acquire_tensors, apply_tensors
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import WriteResults


class SafetensorsLayout(Layout):
    """One safetensors file, and one objects file, for each rank."""

    name: ClassVar[str] = "safetensors"
    plain_extents: ClassVar[bool] = True

    def __init__(self) -> None:
        self._written: list[str] = []
        self._parts: dict[str, int] = {}

    @classmethod
    def described_extents(cls, backend: Backend, key: str, size: int) -> frozenset[tuple[int, int]]:
        header = parse_header(read_header(backend, key, size), size, where=key)
        return frozenset((entry.offset, entry.nbytes) for entry in header.entries)

    def written(self) -> list[str]:
        return list(self._written)

    def write(self, backend: Backend, plan: SavePlan, planner: SavePlanner, naming: FileNaming) -> WriteResults:
        written: list[tuple[I64, WriteResults]] = []
        downloads: Downloads[int] = Downloads(backend.write_window)
        for suffix, extents in zip((".safetensors", ".bytes"), extents_of(plan), strict=True):
            for group in extents.files(MAX_HEADER_BYTES):
                downloads.release()  # the file before this one is written
                file = DataFile(naming, suffix, self._next_part(suffix), group, planner, downloads)
                backend.write(file.key, file.pieces(), size=file.size, exclusive=backend.conditional_create)
                self._written.append(file.key)
                written.append((group.rows, file.results()))
        return WriteResults.reunited(written)

    def _next_part(self, suffix: str) -> int:
        """A plan may be written in several calls, none of which may take the names of another."""
        part = self._parts.get(suffix, 0)
        self._parts[suffix] = part + 1
        return part

    def check(self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem]) -> None:
        rows = PlannedItems.of(items).columns.storage_row
        check_files(backend, metadata, np.unique(metadata.storage.file[rows]).tolist())

    def read(
        self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem], targets: ReadTargets, verify: Verify
    ) -> None:
        wanted = verify is Verify.ALWAYS or (verify is Verify.AUTO and backend.remote)
        checked = wanted and metadata.has_checksums
        checker = BlockChecker(backend, partial_blocks=verify is Verify.ALWAYS) if checked else None
        planned = PlannedItems.of(items)
        is_object = planned.kinds == int(EntryKind.OBJECT)
        objects = planned.take(np.flatnonzero(is_object))
        stored = [metadata.storage_info(item.storage_row) for item in objects]
        for item, extent, data in zip(objects, stored, read_extents(backend, stored), strict=True):
            # Small and decoded by code: always checked, whatever `verify` says of bulk data.
            (checker or BlockChecker(backend, partial_blocks=False)).check(
                extent, item.dest_index.fqn, 0, memoryview(data)
            )
            targets.apply_bytes(item, bytes(data))
        tensors = planned.take(np.flatnonzero(~is_object))
        memory = acquire_tensors(targets, tensors)
        read_tensors(backend, metadata, tensors, memory, checker)
        apply_tensors(targets, tensors, memory)


def read_header(backend: Backend, key: str, size: int) -> bytes:
    """The first bytes of a container of `size` bytes, up to the end of its header or of the file."""
    prefix = bytearray(min(PREFIX_BYTES, size))
    backend.read_ranges(key, [ByteRange(0, len(prefix))], [memoryview(prefix)])
    whole = bytearray(min(PREFIX_BYTES + int.from_bytes(prefix, "little"), size))
    backend.read_ranges(key, [ByteRange(0, len(whole))], [memoryview(whole)])
    return bytes(whole)


def check_files(backend: Backend, metadata: Metadata, files: Collection[int]) -> None:
    """Raise unless these data files (rows of the metadata's) are there, as long and beginning as was recorded."""
    for_each_file(backend, lambda file: _check_file(backend, metadata, file), sorted(files))


def _check_file(backend: Backend, metadata: Metadata, file: int) -> None:
    """Raise unless the data file has the length, and the first bytes, that were recorded."""
    storage = metadata.storage
    key, expected = storage.file_names[file], int(storage.file_sizes[file])
    size = backend.size(key)
    if size != expected:
        raise CorruptCheckpointError(
            f"{key!r} in {backend.url} is {size} bytes long, recorded were {expected}: it was truncated or replaced. "
            "Load another checkpoint."
        )
    head = bytearray(min(size, HEAD_BYTES))
    backend.read_ranges(key, [ByteRange(0, len(head))], [memoryview(head)])
    if head_mark(head) != int(storage.file_marks[file]):
        raise CorruptCheckpointError(
            f"{key!r} in {backend.url} does not begin as the file that was committed: it is damaged, or was swapped "
            "for another save's. Load another checkpoint."
        )
