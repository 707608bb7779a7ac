"""The layout of torch.distributed.checkpoint's files, which is only ever read.

What is on record of a chunk is where its item lies (`torch_folder`). Of the items that a rank reads, the first bytes
are read once, many items together, and say where the elements lie (`_torch_items`); rows are then read by the engine
that reads hpdcp's own files. Items that went through zstd, or hold their elements in another order, are read whole.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

import numpy as np
import torch

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError, HpdcpError, NotSupportedError
from hpdcp._devices import device
from hpdcp._files._torch_checks import check_records, open_item
from hpdcp._files._torch_containers import Containers
from hpdcp._files._torch_items import FIRST_BYTES, MORE_BYTES, ItemReader, NoItemError, is_zip
from hpdcp._files._torch_transforms import check_transforms, undone
from hpdcp._files.box_reads import BoxRead
from hpdcp._files.layout import FileNaming, Layout, Verify
from hpdcp._files.parallel import for_each_file
from hpdcp._files.read_engine import read_boxes, read_extents
from hpdcp._files.torch_folder import ORIGIN, transforms_of
from hpdcp._format.columns import EntryKind, EntryTable
from hpdcp._format.metadata import Metadata, MetadataIndex, StorageInfo
from hpdcp._plan.load_plan import ReadItem
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.read_targets import ReadTargets
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import WriteResults
from hpdcp._state import objects
from hpdcp._state.dtypes import itemsize_of
from hpdcp._state.geometry import Box
from hpdcp._state.views import view_of_box

_HEADS_AT_ONCE: Final = 4096
"""Items whose first bytes are held at a time: 8 MiB."""


class TorchLayout(Layout):
    """Files that torch's FileSystemWriter wrote, by any of its versions and settings."""

    name: ClassVar[str] = ORIGIN
    checks_extents: ClassVar[bool] = True

    def __init__(self) -> None:
        self._items = ItemReader()
        self._containers = Containers()
        self._found: dict[int, StorageInfo | None] = {}
        """Chunk row → where its elements lie; None where its item has to be read whole."""
        self._dtypes: dict[int, torch.dtype] = {}
        """Of the elements of such rows, where it is not the recorded one."""
        self._last_whole: tuple[int, torch.Tensor] | None = None
        """The row that was read whole last: a conversion asks for a large tensor in many boxes, one after another."""

    def check(self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem]) -> None:
        files = {int(metadata.storage.file[item.storage_row]) for item in items}
        transforms = transforms_of(metadata)
        for item in items if transforms else ():
            key = metadata.storage.file_names[int(metadata.storage.file[item.storage_row])]
            check_transforms(item.dest_index.fqn, transforms.get(key, ()))
        for_each_file(backend, lambda file: _check_size(backend, metadata, file), sorted(files))

    def read(
        self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem], targets: ReadTargets, verify: Verify
    ) -> None:
        values = [item for item in items if item.kind is EntryKind.OBJECT]
        for item, data in zip(values, self._read_whole(backend, metadata, values), strict=True):
            targets.apply_bytes(item, data)
        tensors = [item for item in items if item.kind is not EntryKind.OBJECT]
        self._find(backend, metadata, tensors)
        reads = [
            self._box_read(metadata, item, stored, targets.acquire_tensor(item))
            for item in tensors
            if (stored := self._found[item.storage_row]) is not None
        ]
        read_boxes(backend, reads, None)
        filled = iter(reads)
        for item in tensors:
            if self._found[item.storage_row] is not None:
                targets.apply_tensor(item, next(filled).target)
        for item in sorted(tensors, key=lambda item: item.storage_row):
            if self._found[item.storage_row] is None:
                target = targets.acquire_tensor(item)
                whole = self._decoded(backend, metadata, item)
                device.copy_into(target, view_of_box(whole, item.storage_offsets, item.lengths))
                targets.apply_tensor(item, target)

    def _box_read(self, metadata: Metadata, item: ReadItem, stored: StorageInfo, target: torch.Tensor) -> BoxRead:
        _, sizes = metadata.chunks.box(item.storage_row)
        box = Box(item.storage_offsets, item.lengths)
        return BoxRead(item.dest_index.fqn, stored, self._dtypes[item.storage_row], sizes, box, target)

    def _find(self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem]) -> None:
        """Learn where the elements of each item's chunk lie."""
        transforms = transforms_of(metadata)
        asked: dict[str, list[ReadItem]] = {}
        for item in {item.storage_row: item for item in items}.values():
            if item.storage_row not in self._found:
                key = metadata.storage.file_names[int(metadata.storage.file[item.storage_row])]
                if key in transforms:
                    self._found[item.storage_row] = None
                else:
                    asked.setdefault(key, []).append(item)
        batches = [
            (key, found[start : start + _HEADS_AT_ONCE])
            for key, found in asked.items()
            for start in range(0, len(found), _HEADS_AT_ONCE)
        ]
        for_each_file(backend, lambda batch: self._find_in(backend, metadata, *batch), batches)

    def _find_in(self, backend: Backend, metadata: Metadata, key: str, items: Sequence[ReadItem]) -> None:
        undecided = list(items)
        for most in (FIRST_BYTES, MORE_BYTES):
            heads = _read_heads(backend, metadata, key, undecided, most)
            undecided = [
                item
                for item, head in zip(undecided, heads, strict=True)
                if not self._settle(backend, metadata, key, item, head)
            ]
        for item in undecided:
            self._found[item.storage_row] = None

    def _settle(self, backend: Backend, metadata: Metadata, key: str, item: ReadItem, head: memoryview) -> bool:
        """Whether the first bytes of an item say where its elements lie."""
        row = item.storage_row
        offset, length = int(metadata.storage.offset[row]), int(metadata.storage.length[row])
        _, sizes = metadata.chunks.box(row)
        try:
            if is_zip(head):
                found = self._items.find(head, sizes, length)
            else:
                begin, _ = metadata.chunks.box(row)
                size = int(metadata.storage.file_sizes[metadata.storage.file[row]])
                found = self._containers.find(backend, key, size, offset, (item.dest_index.fqn, begin, sizes))
        except NoItemError as error:
            raise CorruptCheckpointError(
                f"{key!r} in {backend.url} does not hold {item.dest_index.fqn!r} at byte {offset}: {error}. It is "
                "damaged, or another save's. Load another checkpoint."
            ) from None
        if found is not None:
            self._found[row] = StorageInfo(key, offset + found.offset, found.nbytes, ())
            self._dtypes[row] = found.dtype
        return found is not None

    def _decoded(self, backend: Backend, metadata: Metadata, item: ReadItem) -> torch.Tensor:
        """The whole tensor of an item."""
        row = item.storage_row
        if self._last_whole is not None and self._last_whole[0] == row:
            return self._last_whole[1]
        self._last_whole = None
        (data,) = self._read_whole(backend, metadata, [item])
        fqn = item.dest_index.fqn
        found = objects.decode(data, key=fqn, allow_pickle=False)
        _, sizes = metadata.chunks.box(row)
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != sizes or found.layout != torch.strided:
            raise CorruptCheckpointError(
                f"{metadata.storage_info(row).key!r} in {backend.url} holds for {fqn!r} no tensor of shape "
                f"{list(sizes)}, as recorded: it is damaged. Load another checkpoint."
            )
        self._last_whole = (row, found)
        return found

    def _read_whole(self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem]) -> Iterator[bytes]:
        """The item of each, as torch.save wrote it."""
        transforms = transforms_of(metadata)
        stored = [metadata.storage_info(item.storage_row) for item in items]
        for item, extent, data in zip(items, stored, read_extents(backend, stored), strict=True):
            entry = metadata.entries[int(metadata.chunks.entry[item.storage_row])]
            _, sizes = metadata.chunks.box(item.storage_row)
            expected = int(np.prod(sizes, dtype=np.int64)) * itemsize_of(entry.dtype)
            yield undone(data, transforms.get(extent.key, ()), key=item.dest_index.fqn, expected=expected)

    def check_extent(self, backend: Backend, metadata: Metadata, row: int) -> int:
        stored = metadata.storage_info(row)
        entry = metadata.entries[int(metadata.chunks.entry[row])]
        is_value = entry.kind is EntryKind.OBJECT
        item = ReadItem(MetadataIndex(entry.fqn), row, (), (), (), entry.kind)
        if stored.key in transforms_of(metadata):
            (data,) = self._read_whole(backend, metadata, [item])
            return check_records(io.BytesIO(data), len(data))
        (head,) = _read_heads(backend, metadata, stored.key, [item], FIRST_BYTES)
        if not is_value:
            self._settle(backend, metadata, stored.key, item, head)
            if not is_zip(head):
                return 0  # safetensors has none
        with open_item(backend, stored) as file:
            return check_records(file, stored.length)

    def arrange(
        self, plans: Sequence[SavePlan], metadata: Metadata, locals_: Sequence[SavePlan]
    ) -> tuple[Sequence[SavePlan], Metadata]:
        raise _only_read()

    def write(self, backend: Backend, plan: SavePlan, planner: SavePlanner, naming: FileNaming) -> WriteResults:
        raise _only_read()

    def written(self) -> list[str]:
        return []

    def roots(self, tables: Sequence[EntryTable]) -> frozenset[str]:
        raise _only_read()


def _only_read() -> HpdcpError:
    return NotSupportedError(
        "layout 'torch' is that of torch.distributed.checkpoint's files, which hpdcp reads and does not write. Save in "
        "another layout, or with torch.distributed.checkpoint.save."
    )


def _check_size(backend: Backend, metadata: Metadata, file: int) -> None:
    key, expected = metadata.storage.file_names[file], int(metadata.storage.file_sizes[file])
    size = backend.size(key)
    if size != expected:
        raise CorruptCheckpointError(
            f"{key!r} in {backend.url} is {size} bytes long, and was {expected} when the metadata was read: another "
            "save replaces it. Load again."
        )


def _read_heads(
    backend: Backend, metadata: Metadata, key: str, items: Sequence[ReadItem], most: int
) -> list[memoryview]:
    """The first bytes of each item."""
    rows = [item.storage_row for item in items]
    ranges = [
        ByteRange(offset, min(length, most))
        for offset, length in zip(
            metadata.storage.offset[rows].tolist(), metadata.storage.length[rows].tolist(), strict=True
        )
    ]
    memory = memoryview(bytearray(sum(each.length for each in ranges)))
    heads: list[memoryview] = []
    start = 0
    for each in ranges:
        heads.append(memory[start : start + each.length])
        start += each.length
    if ranges:
        backend.read_ranges(key, ranges, heads)
    return heads
