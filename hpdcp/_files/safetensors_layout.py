"""The default layout: tensors in safetensors files, Python values in an objects file of the same container.

    _rank0_.<attempt>.safetensors   rank 0's chunks; any safetensors reader opens it
    _rank0_.<attempt>.bytes         rank 0's Python values, one U8 entry each

A file is written from the tensors' own memory: all sizes are known, so its header goes first. The header also says
which box of which global tensor each entry is, so a file explains itself when `.metadata` is lost.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import ClassVar

import torch

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._base.splitting import batches
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._devices.downloads import Downloads
from hpdcp._files.block_checker import BlockChecker
from hpdcp._files.box_reads import BoxRead
from hpdcp._files.layout import FileNaming, Layout, Verify
from hpdcp._files.parallel import for_each_file
from hpdcp._files.read_engine import read_boxes, read_extents
from hpdcp._format.checksums import HEAD_BYTES, BlockChecksums, head_mark
from hpdcp._format.columns import EntryKind
from hpdcp._format.container import MAX_HEADER_BYTES, PREFIX_BYTES, TensorEntry, build_header, parse_header
from hpdcp._format.dtypes import SAFETENSORS_NAMES
from hpdcp._format.metadata import Metadata, StorageInfo
from hpdcp._plan.load_plan import ReadItem
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.read_targets import ReadTargets
from hpdcp._plan.save_plan import SavePlan, WriteItem
from hpdcp._plan.write_results import FileRecord, WriteResult, WriteResults
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.geometry import Box


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where one item lies in a file."""

    row: int
    """Of the plan."""
    item: WriteItem
    key: str
    dtype_name: str
    shape: tuple[int, ...]
    alignment: int
    about: dict[str, object]
    """What the header says of it."""


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
        tensors, objects = _extents(plan)
        results: dict[int, WriteResult] = {}
        files: list[FileRecord] = []
        downloads: Downloads[int] = Downloads(backend.write_window)
        for suffix, extents in ((".safetensors", tensors), (".bytes", objects)):
            for group in batches(extents, _header_bytes, MAX_HEADER_BYTES):
                downloads.release()  # the file before this one is written
                file = _DataFile(naming, suffix, self._next_part(suffix), group, planner, downloads)
                record = self._create(backend, file)
                files.append(record)
                results |= file.results(record.key)
        return WriteResults.build([results[row] for row in range(len(plan))], files)

    def _next_part(self, suffix: str) -> int:
        """A plan may be written in several calls, none of which may take the names of another."""
        part = self._parts.get(suffix, 0)
        self._parts[suffix] = part + 1
        return part

    def _create(self, backend: Backend, file: _DataFile) -> FileRecord:
        key = file.naming.key(file.suffix, file.part)
        backend.write(key, file.pieces(), size=file.size, exclusive=backend.conditional_create)
        self._written.append(key)
        return FileRecord(key, file.size, file.mark)

    def check(self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem]) -> None:
        check_files(backend, metadata, {int(metadata.storage.file[item.storage_row]) for item in items})

    def read(
        self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem], targets: ReadTargets, verify: Verify
    ) -> None:
        wanted = verify is Verify.ALWAYS or (verify is Verify.AUTO and backend.remote)
        checked = wanted and metadata.has_checksums
        checker = BlockChecker(backend, partial_blocks=verify is Verify.ALWAYS) if checked else None
        objects = [item for item in items if item.kind is EntryKind.OBJECT]
        stored = [metadata.storage_info(item.storage_row) for item in objects]
        for item, extent, data in zip(objects, stored, read_extents(backend, stored), strict=True):
            # Small and decoded by code: always checked, whatever `verify` says of bulk data.
            (checker or BlockChecker(backend, partial_blocks=False)).check(
                extent, item.dest_index.fqn, 0, memoryview(data)
            )
            targets.apply_bytes(item, bytes(data))
        tensors = [item for item in items if item.kind is not EntryKind.OBJECT]
        reads = [_box_read(metadata, item, targets) for item in tensors]
        read_boxes(backend, reads, checker)
        for item, read in zip(tensors, reads, strict=True):
            targets.apply_tensor(item, read.target)


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


def _box_read(metadata: Metadata, item: ReadItem, targets: ReadTargets) -> BoxRead:
    stored = metadata.storage_info(item.storage_row)
    entry = int(metadata.chunks.entry[item.storage_row])
    _, sizes = metadata.chunks.box(item.storage_row)
    fqn, name = item.dest_index.fqn, metadata.entries.dtype(entry)
    dtype = dtype_of(name, fqn=fqn)
    if stored.length != torch.Size(sizes).numel() * dtype.itemsize:
        raise CorruptCheckpointError(
            f"{fqn!r}: {list(sizes)} of {name} is not {stored.length} bytes; .metadata is damaged."
        )
    return BoxRead(fqn, stored, dtype, sizes, Box(item.storage_offsets, item.lengths), targets.acquire_tensor(item))


class _DataFile:
    """One file about to be written: its header is known before any byte of data is."""

    def __init__(
        self,
        naming: FileNaming,
        suffix: str,
        part: int,
        extents: Sequence[_Extent],
        planner: SavePlanner,
        downloads: Downloads[int],
    ) -> None:
        self.naming = naming
        self.suffix = suffix
        self.part = part
        self._extents = extents
        self._planner = planner
        self._downloads = downloads
        self._checksums: dict[int, list[int]] = {}

    @cached_property
    def _header(self) -> tuple[bytes, list[int]]:
        # The attempt comes first: `commit.attempt_in_header` and the file's mark look at the first bytes only.
        return build_header(
            [TensorEntry(e.key, e.dtype_name, e.shape, e.item.nbytes) for e in self._extents],
            {
                "attempt": self.naming.attempt,
                "rank": str(self.naming.rank),
                "part": f"{self.part}{self.suffix}",
                "chunks": json.dumps([e.about for e in self._extents], separators=(",", ":")),
            },
        )

    @property
    def size(self) -> int:
        """The whole file's length in bytes."""
        return len(self._header[0]) + sum(extent.item.nbytes for extent in self._extents)

    @property
    def mark(self) -> int:
        """Of its first bytes, as `head_mark` makes it."""
        return head_mark(self._header[0])

    def pieces(self) -> Iterator[memoryview]:
        """The file's bytes in order, checksummed as they go by."""
        yield memoryview(self._header[0])
        self._planner.expect([extent.item for extent in self._extents])
        for row, pieces in itertools.groupby(self._data(), itemgetter(0)):
            running = BlockChecksums()
            for _, piece in pieces:
                running.add(piece)
                yield piece
            self._checksums[row] = running.finish()

    def results(self, key: str) -> dict[int, WriteResult]:
        """Row of the plan → where it was stored."""
        return {
            extent.row: WriteResult(
                StorageInfo(key, offset, extent.item.nbytes, tuple(self._checksums.get(extent.row, ())))
            )
            for extent, offset in zip(self._extents, self._header[1], strict=True)
        }

    def _data(self) -> Iterator[tuple[int, memoryview]]:
        """The extents' bytes in order, each piece with its row."""
        objects = [extent for extent in self._extents if extent.item.kind is EntryKind.OBJECT]
        for extent in objects:
            yield extent.row, memoryview(self._planner.get_bytes(extent.item))
        tensors = (extent for extent in self._extents if extent.item.kind is not EntryKind.OBJECT)
        parts = ((extent.row, part) for extent in tensors for part in self._planner.get_parts(extent.item))
        for row, part in self._downloads.on_host(parts):
            for piece in byte_pieces(part):
                yield row, piece


def _extents(plan: SavePlan) -> tuple[list[_Extent], list[_Extent]]:
    """The plan's tensors and objects, each in the order they take in a file.

    Wider elements first: sizes are multiples of the width, so every tensor starts where its dtype may, without holes.
    """
    names = _Names(plan)
    tensors: list[_Extent] = []
    objects: list[_Extent] = []
    for row, item in enumerate(plan.items):
        entry = plan.entries[int(plan.chunks.entry[row])]
        about: dict[str, object] = {"fqn": entry.fqn}
        if entry.owner is not None:
            about["owner"] = entry.owner
        if item.kind is EntryKind.OBJECT:
            objects.append(_Extent(row, item, names.of(item), "U8", (item.nbytes,), 1, about))
            continue
        dtype = dtype_of(entry.dtype)
        name = SAFETENSORS_NAMES.get(entry.dtype)
        about |= {"dtype": entry.dtype, "shape": entry.shape, "offsets": item.index.offsets}
        shape = item.index.sizes if name is not None else (*item.index.sizes, dtype.itemsize)
        tensors.append(_Extent(row, item, names.of(item), name or "U8", shape, dtype.itemsize, about))
    tensors.sort(key=lambda e: (-e.alignment, e.item.index.fqn, e.item.index.offsets, e.row))
    objects.sort(key=lambda e: (e.item.index.fqn, e.row))
    return tensors, objects


class _Names:
    """The name of each item inside a file: the fqn, made safe and unique."""

    def __init__(self, plan: SavePlan) -> None:
        self._count: dict[str, int] = {}
        for item in plan.items:
            self._count[item.index.fqn] = self._count.get(item.index.fqn, 0) + 1
        self._taken: set[str] = set()

    def of(self, item: WriteItem) -> str:
        name = _safe(item.index.fqn)
        if self._count[item.index.fqn] > 1:
            name += f"@{list(item.index.offsets)}".replace(" ", "")
        unique, number = name, 1
        while unique in self._taken or (unique != name and unique in self._count):
            number += 1
            unique = f"{name}#{number}"
        self._taken.add(unique)
        return unique


def _safe(fqn: str) -> str:
    """`fqn` itself, unless readers of safetensors files stumble over it; then with what is unsafe as %XX."""
    if fqn in ("", "__metadata__") or any(part in (".", "..") for part in fqn.replace("\\", "/").split("/")):
        return "%" + fqn.replace("%", "%25").replace(".", "%2E").replace("/", "%2F")
    if any(ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF for char in fqn):
        return "".join(
            f"%{ord(char):02X}" if ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF or char == "%" else char
            for char in fqn
        )
    return fqn


def _header_bytes(extent: _Extent) -> int:
    """About what an extent takes in a header.

    Twice the names, shapes and offsets as JSON, and what surrounds them; generous, since it only decides a split.
    """
    return 12 * (len(extent.key) + len(extent.item.index.fqn)) + 44 * (len(extent.shape) + 1) * 3 + 256
