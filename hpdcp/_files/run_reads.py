"""Boxes that are one run of bytes in a file and one run of host memory, read for all items of a plan at once.

Nearly every item is one. The others (column slices, casts, other strides, devices) go through `read_engine` as boxes,
one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hpdcp._base.backend import Backend, ByteRange, memory_view
from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._devices.memory_runs import MemoryRuns, memory_runs
from hpdcp._files.block_checker import BlockChecker
from hpdcp._files.box_reads import SLAB_BYTES, BoxRead
from hpdcp._files.parallel import in_parallel
from hpdcp._files.read_engine import CONCURRENT_WINDOWS, read_boxes
from hpdcp._format.columns import I64, ChunkTable, starts_of
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import PlannedItems
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.geometry import Box

_RANGES_AT_ONCE: Final = 1 << 14
"""Ranges asked for in one call across a network; their objects are small, and there may be millions."""
_RANGES_AT_ONCE_HERE: Final = 192
"""On this machine: three objects each, and from 700 new ones on Python collects garbage, in the end all through torch
(0.15 s for 10,000 tensors, as long as all else)."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredBoxes:
    """The boxes of a plan's items as bytes of files, row by row."""

    items: PlannedItems
    rows: I64
    """Of `Metadata.chunks`, the chunk that each is in."""
    dtypes: Sequence[torch.dtype]
    begins: I64
    """Of the box in the chunk, in bytes; where `is_run`."""
    lengths: I64
    """Bytes."""
    is_run: npt.NDArray[np.bool_]
    """Whether the box is one unbroken run of the chunk."""


def read_tensors(
    backend: Backend,
    metadata: Metadata,
    items: PlannedItems,
    tensors: Sequence[torch.Tensor],
    checker: BlockChecker | None,
) -> None:
    """Fill `tensors`, one for each of the TENSOR `items`, from plain extents.

    Raises:
        UnsupportedTypeError: this torch lacks a stored dtype.
        CorruptCheckpointError: a chunk is not as long as its shape makes it, a file is shorter than recorded, or
            `checker` found a block that differs.
        StorageError: the store failed; targets are undefined.
    """
    stored = _stored_boxes(metadata, items)
    runs = memory_runs(tensors)
    straight = _straight(backend, metadata, stored, runs, checker)
    _read_runs(backend, metadata, stored, runs.take(straight), checker)
    others = np.ones(len(items), dtype=np.bool_)
    others[runs.tensors[straight]] = False
    read_boxes(backend, _box_reads(metadata, stored, tensors, np.flatnonzero(others)), checker)


def _stored_boxes(metadata: Metadata, items: PlannedItems) -> StoredBoxes:
    columns, storage = items.columns, metadata.storage
    rows = columns.storage_row
    chunks = metadata.chunks.take(rows)
    codes = metadata.entries.dtype_codes[chunks.entry]
    dtype_of_code: dict[int, torch.dtype] = {}
    for code, number in zip(*(each.tolist() for each in np.unique(codes, return_index=True)), strict=True):
        dtype_of_code[code] = dtype_of(metadata.entries.dtype_names[code], fqn=items.fqns[number])
    dtypes = [dtype_of_code[code] for code in codes.tolist()]
    itemsizes = np.fromiter((dtype.itemsize for dtype in dtypes), np.int64, len(dtypes))
    wrong = np.flatnonzero(storage.length[rows] != chunks.volumes() * itemsizes)
    if len(wrong):
        number = int(wrong[0])
        _, sizes = chunks.box(number)
        name = metadata.entries.dtype(int(chunks.entry[number]))
        raise CorruptCheckpointError(
            f"{items.fqns[number]!r}: {list(sizes)} of {name} is not {int(storage.length[rows[number]])} bytes; "
            ".metadata is damaged."
        )
    first, span = _first_and_span(chunks, columns.storage_offsets, columns.boxes.sizes)
    volumes = columns.boxes.volumes()
    return StoredBoxes(items, rows, dtypes, first * itemsizes, volumes * itemsizes, span == volumes)


def _first_and_span(chunks: ChunkTable, offsets: I64, sizes: I64) -> tuple[I64, I64]:
    """Of a box in each chunk, its first element, and how many there are from that one to its last, in row-major order.

    `offsets` and `sizes` are the boxes', in the chunks' own coordinates and laid out as theirs.
    """
    starts = starts_of(chunks.ends)
    first = np.zeros(len(chunks), dtype=np.int64)
    span = np.ones(len(chunks), dtype=np.int64)
    strides = np.ones(len(chunks), dtype=np.int64)
    for axis in range(1, int((chunks.ends - starts).max(initial=0)) + 1):
        # From the last axis of each; those that have none left stay as they are.
        has = np.flatnonzero(chunks.ends - axis >= starts)
        place = chunks.ends[has] - axis
        first[has] += offsets[place] * strides[has]
        span[has] += (sizes[place] - 1) * strides[has]
        strides[has] *= chunks.sizes[place]
    return first, span


def _straight(
    backend: Backend, metadata: Metadata, stored: StoredBoxes, runs: MemoryRuns, checker: BlockChecker | None
) -> npt.NDArray[np.intp]:
    """Rows of `runs` that are filled by one range of a file each."""
    numbers = runs.tensors
    lengths = stored.lengths[numbers]
    good = stored.is_run[numbers] & (runs.lengths == lengths)
    if backend.remote:
        good &= lengths <= SLAB_BYTES
    if checker is not None:
        # Blocks that are read in part are looked at where boxes are read.
        good &= lengths == metadata.storage.length[stored.rows[numbers]]
    on_host = np.array([device.type == "cpu" for device in runs.devices], dtype=np.bool_)
    alike = (found is stored.dtypes[number] for number, found in zip(numbers.tolist(), runs.dtypes, strict=True))
    return np.flatnonzero(good & on_host[runs.device_codes] & np.fromiter(alike, np.bool_, len(runs)))


def _read_runs(
    backend: Backend, metadata: Metadata, stored: StoredBoxes, runs: MemoryRuns, checker: BlockChecker | None
) -> None:
    rows = stored.rows[runs.tensors]
    files = metadata.storage.file[rows]
    offsets = metadata.storage.offset[rows] + stored.begins[runs.tensors]
    order = np.lexsort((offsets, files))

    def read(window: npt.NDArray[np.intp]) -> None:
        ranges = list(map(ByteRange, offsets[window].tolist(), runs.lengths[window].tolist()))
        views = list(map(memory_view, runs.addresses[window].tolist(), runs.lengths[window].tolist()))
        backend.read_ranges(metadata.storage.file_names[int(files[window[0]])], ranges, views)
        if checker is not None:
            for at, view in zip(window.tolist(), views, strict=True):
                checker.check(metadata.storage_info(int(rows[at])), stored.items.fqns[int(runs.tensors[at])], 0, view)

    windows = _windows(files[order], runs.lengths[order], remote=backend.remote)
    in_parallel(lambda window: read(order[window]), windows, threads=CONCURRENT_WINDOWS if backend.remote else 1)


def _windows(files: npt.NDArray[np.int32], lengths: I64, *, remote: bool) -> list[slice]:
    """Rows, sorted by file, to ask for together: of one file, not too many, and across a network not too long."""
    bounds = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(files)] if len(files) else []
    ends = np.cumsum(lengths)
    found: list[slice] = []
    for start, stop in itertools.pairwise(bounds):
        while start < stop:
            end = min(stop, start + (_RANGES_AT_ONCE if remote else _RANGES_AT_ONCE_HERE))
            if remote:
                taken = int(ends[start - 1]) if start else 0
                end = min(end, max(start + 1, int(np.searchsorted(ends, taken + SLAB_BYTES, side="right"))))
            found.append(slice(start, end))
            start = end
    return found


def _box_reads(
    metadata: Metadata, stored: StoredBoxes, tensors: Sequence[torch.Tensor], numbers: npt.NDArray[np.intp]
) -> list[BoxRead]:
    reads: list[BoxRead] = []
    for number, item in zip(numbers.tolist(), stored.items.take(numbers), strict=True):
        _, sizes = metadata.chunks.box(item.storage_row)
        info = metadata.storage_info(item.storage_row)
        box = Box(item.storage_offsets, item.lengths)
        reads.append(BoxRead(item.dest_index.fqn, info, stored.dtypes[number], sizes, box, tensors[number]))
    return reads
