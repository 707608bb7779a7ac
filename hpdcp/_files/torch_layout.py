"""The layout of torch.distributed.checkpoint's files, which is only ever read.

What is on record of a chunk is where its item lies (`torch_folder`). Of the items that a rank reads, the first bytes
are read once, many items together, and say where the elements lie (`_torch_items`); rows are then read by the engine
that reads hpdcp's own files. Items that went through zstd, or hold their elements in another order, are read whole.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError, HpdcpError, NotSupportedError
from hpdcp._devices import device
from hpdcp._files._torch_checks import check_records, open_item
from hpdcp._files._torch_containers import Containers
from hpdcp._files._torch_items import FIRST_BYTES, MORE_BYTES, Elements, ItemReader, NoItemError, is_zip
from hpdcp._files._torch_transforms import check_transforms, undone
from hpdcp._files.layout import FileNaming, Layout, Verify
from hpdcp._files.parallel import for_each_file
from hpdcp._files.read_engine import read_extents
from hpdcp._files.run_reads import read_tensors
from hpdcp._files.torch_folder import ORIGIN, transforms_of
from hpdcp._format.columns import EntryKind, EntryTable
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import PlannedItems, ReadItem
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.read_targets import ReadTargets, acquire_tensors, apply_tensors
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import WriteResults
from hpdcp._state import objects
from hpdcp._state.dtypes import find_dtype, itemsize_of
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
        self._elements: _Elements | None = None
        self._last_whole: tuple[int, torch.Tensor] | None = None
        """The row that was read whole last: a conversion asks for a large tensor in many boxes, one after another."""

    def check(self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem]) -> None:
        files, first = np.unique(
            metadata.storage.file[rows := PlannedItems.of(items).columns.storage_row], return_index=True
        )
        transforms = transforms_of(metadata)
        for file, row in zip(files.tolist(), rows[first].tolist(), strict=True) if transforms else ():
            check_transforms(_name(metadata, row), transforms.get(metadata.storage.file_names[file], ()))
        for_each_file(backend, lambda file: _check_size(backend, metadata, file), files.tolist())

    def read(
        self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem], targets: ReadTargets, verify: Verify
    ) -> None:
        planned = PlannedItems.of(items)
        rows, is_value = planned.columns.storage_row, planned.kinds == int(EntryKind.OBJECT)
        values = planned.take(np.flatnonzero(is_value))
        for item, data in zip(values, self._read_whole(backend, metadata, values.columns.storage_row), strict=True):
            targets.apply_bytes(item, data)
        elements = self._found(backend, metadata, np.unique(rows[~is_value]))
        plain = elements.state[rows] == _IN_ROWS
        tensors = planned.take(np.flatnonzero(plain))
        memory = acquire_tensors(targets, tensors)
        read_tensors(backend, elements.metadata, tensors, memory, None)
        apply_tensors(targets, tensors, memory)
        others = planned.take(np.flatnonzero(~is_value & ~plain))
        for item in sorted(others, key=lambda item: item.storage_row):
            target = targets.acquire_tensor(item)
            whole = self._decoded(backend, metadata, item.storage_row)
            device.copy_into(target, view_of_box(whole, item.storage_offsets, item.lengths))
            targets.apply_tensor(item, target)

    def _found(self, backend: Backend, metadata: Metadata, rows: npt.NDArray[np.integer]) -> _Elements:
        """Where elements lie, these rows' among them."""
        if self._elements is None:
            self._elements = _Elements(metadata)
        elements = self._elements
        transforms = transforms_of(metadata)
        unknown = rows[elements.state[rows] == _UNKNOWN]
        batches: list[tuple[str, list[int]]] = []
        for file in np.unique(metadata.storage.file[unknown]).tolist():
            key, inside = metadata.storage.file_names[file], unknown[metadata.storage.file[unknown] == file]
            if key in transforms:
                elements.state[inside] = _WHOLE
                continue
            inside = inside[np.argsort(metadata.storage.offset[inside], kind="stable")]
            starts = range(0, len(inside), _HEADS_AT_ONCE)
            batches += [(key, inside[start : start + _HEADS_AT_ONCE].tolist()) for start in starts]
        for_each_file(backend, lambda batch: self._find_in(backend, metadata, elements, *batch), batches)
        return elements

    def _find_in(
        self, backend: Backend, metadata: Metadata, elements: _Elements, key: str, rows: Sequence[int]
    ) -> None:
        undecided = list(rows)
        for most in (FIRST_BYTES, MORE_BYTES):
            heads = _read_heads(backend, metadata, key, undecided, most)
            left: list[int] = []
            for row, head in zip(undecided, heads, strict=True):
                found = self._find(backend, metadata, row, head)
                if found is None:
                    left.append(row)
                else:
                    elements.add(row, found)
            undecided = left
        elements.state[undecided] = _WHOLE

    def _find(self, backend: Backend, metadata: Metadata, row: int, head: memoryview) -> Elements | None:
        """Where the elements of a chunk lie in its item, which begins with `head`; None where that does not tell."""
        storage = metadata.storage
        key, size = storage.file_names[int(storage.file[row])], int(storage.file_sizes[storage.file[row]])
        offset, length = int(storage.offset[row]), int(storage.length[row])
        begin, sizes = metadata.chunks.box(row)
        fqn = _name(metadata, row)
        try:
            if is_zip(head):
                return self._items.find(head, sizes, length)
            return self._containers.find(backend, key, size, offset, (fqn, begin, sizes))
        except NoItemError as error:
            raise CorruptCheckpointError(
                f"{key!r} in {backend.url} does not hold {fqn!r} at byte {offset}: {error}. It is damaged, or another "
                "save's. Load another checkpoint."
            ) from None

    def _decoded(self, backend: Backend, metadata: Metadata, row: int) -> torch.Tensor:
        """The whole tensor of an item."""
        if self._last_whole is not None and self._last_whole[0] == row:
            return self._last_whole[1]
        self._last_whole = None
        (data,) = self._read_whole(backend, metadata, [row])
        fqn = _name(metadata, row)
        found = objects.decode(data, key=fqn, allow_pickle=False)
        _, sizes = metadata.chunks.box(row)
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != sizes or found.layout != torch.strided:
            raise CorruptCheckpointError(
                f"{metadata.storage_info(row).key!r} in {backend.url} holds for {fqn!r} no tensor of shape "
                f"{list(sizes)}, as recorded: it is damaged. Load another checkpoint."
            )
        self._last_whole = (row, found)
        return found

    def _read_whole(self, backend: Backend, metadata: Metadata, rows: Iterable[int]) -> Iterator[bytes]:
        """The item of each row, as torch.save wrote it."""
        transforms = transforms_of(metadata)
        chosen = [int(row) for row in rows]
        stored = [metadata.storage_info(row) for row in chosen]
        for row, extent, data in zip(chosen, stored, read_extents(backend, stored), strict=True):
            _, sizes = metadata.chunks.box(row)
            dtype = metadata.entries.dtype(int(metadata.chunks.entry[row]))
            expected = math.prod(sizes) * itemsize_of(dtype) if dtype else 0
            yield undone(data, transforms.get(extent.key, ()), key=_name(metadata, row), expected=expected)

    def check_extent(self, backend: Backend, metadata: Metadata, row: int) -> int:
        stored = metadata.storage_info(row)
        if stored.key in transforms_of(metadata):
            (data,) = self._read_whole(backend, metadata, [row])
            return check_records(io.BytesIO(data), len(data))
        (head,) = _read_heads(backend, metadata, stored.key, [row], FIRST_BYTES)
        if metadata.entries.kinds[metadata.chunks.entry[row]] != EntryKind.OBJECT:
            self._find(backend, metadata, row, head)
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


_UNKNOWN, _IN_ROWS, _WHOLE = 0, 1, 2


class _Elements:
    """Where elements lie, as far as it is known: the same metadata with their extents in place of their items'."""

    def __init__(self, metadata: Metadata) -> None:
        storage = metadata.storage
        self._offset, self._length = storage.offset.copy(), storage.length.copy()
        self.metadata = metadata.with_storage(replace(storage, offset=self._offset, length=self._length), {})
        self.state: npt.NDArray[np.uint8] = np.full(len(metadata.chunks), _UNKNOWN, dtype=np.uint8)
        """Of each chunk: whether it is in `metadata`, or its item has to be read whole."""

    def add(self, row: int, found: Elements) -> None:
        """Elements of another dtype than is recorded are left to torch, which casts them."""
        recorded = find_dtype(self.metadata.entries.dtype(int(self.metadata.chunks.entry[row])))
        if found.dtype != recorded:
            self.state[row] = _WHOLE
            return
        self._offset[row] += found.offset
        self._length[row] = found.nbytes
        self.state[row] = _IN_ROWS


def _name(metadata: Metadata, row: int) -> str:
    return metadata.entries.fqns[int(metadata.chunks.entry[row])]


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


def _read_heads(backend: Backend, metadata: Metadata, key: str, rows: Sequence[int], most: int) -> list[memoryview]:
    """The first bytes of each row's item."""
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
