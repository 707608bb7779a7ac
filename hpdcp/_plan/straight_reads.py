"""Wanted boxes that are stored just as they are wanted, found for all tensors of a state dict at once.

Nearly every tensor of a load is one: a rank wants one box of it, into one run of memory, and that very box was stored,
in that very dtype. For these nothing is decided one by one. Whatever else a tensor is (resharded, cast, strided, tied,
missing, of another shape) takes the planner's way tensor by tensor, which would plan the same for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from hpdcp._base.errors import HpdcpError
from hpdcp._devices import device
from hpdcp._devices.memory_runs import MemoryRuns, memory_runs
from hpdcp._format.columns import I64, ChunkTable, EntryKind, starts_of, take_runs
from hpdcp._format.metadata import CHUNK_INFO, Metadata
from hpdcp._format.strings import StringColumn
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.read_items import ItemColumns, TargetColumns
from hpdcp._plan.shared_boxes import DIRECT, ON_DEVICE
from hpdcp._state.dtypes import dtype_name
from hpdcp._state.geometry import Box
from hpdcp._state.sharding import is_copied_view, local_shards
from hpdcp._state.tree import Leaf


@dataclass(frozen=True, slots=True, eq=False)
class WantedTensors:
    """Tensors of which this rank wants one box into one run of memory, row by row."""

    leaves: Sequence[Leaf]
    memory: Sequence[torch.Tensor]
    """What is filled: the tensor itself, or a DTensor's local one."""
    runs: MemoryRuns
    """Where that lies."""
    boxes: ChunkTable
    """In global coordinates; `entry` is the row here."""
    shape_dims: I64
    """Global shapes, laid out as the boxes are."""

    def __len__(self) -> int:
        return len(self.leaves)

    def take(self, rows: npt.NDArray[np.integer]) -> WantedTensors:
        """These rows alone, ascending."""
        if len(rows) == len(self):
            return self
        order = rows.tolist()
        _, positions = take_runs(self.boxes.ends, rows)
        return WantedTensors(
            [self.leaves[row] for row in order],
            [self.memory[row] for row in order],
            self.runs.take(rows),
            self.boxes.take(rows).with_entry(np.arange(len(rows))),
            self.shape_dims[positions],
        )


@dataclass(frozen=True, slots=True, eq=False)
class StraightReads:
    """Wanted tensors, each of which is all of one stored chunk."""

    wanted: WantedTensors
    storage_rows: I64
    """The row of each one's chunk in `Metadata.chunks`."""

    def as_plan(self) -> LoadPlan:
        """Row by row one target and the one item that fills it."""
        wanted = self.wanted
        count, boxes, runs = len(wanted), wanted.boxes, wanted.runs
        dtypes = {dtype: row for row, dtype in enumerate(dict.fromkeys(runs.dtypes))}
        current = device.current_device()
        flags = np.array([_flags(where, current) for where in runs.devices], dtype=np.uint8)
        origins = np.zeros_like(boxes.offsets)
        return LoadPlan(
            StringColumn.from_strings(leaf.fqn for leaf in wanted.leaves),
            StringColumn.from_strings(map(dtype_name, dtypes)),
            TargetColumns(
                boxes,
                np.full(count, -1, dtype=np.int64),
                np.full(count, EntryKind.TENSOR, dtype=np.uint8),
                np.fromiter(map(dtypes.__getitem__, runs.dtypes), np.int32, count),
                flags[runs.device_codes],
            ),
            ItemColumns(
                ChunkTable(np.arange(count), boxes.ends, origins, boxes.sizes),
                origins,
                self.storage_rows,
            ),
        )


def wanted_tensors(leaves: Sequence[Leaf]) -> WantedTensors:
    """Those of `leaves` that are one box of a tensor all ranks share, in one run of memory of its own.

    Memory that two of them begin at may be a tie, and is left out.
    """
    found: list[Leaf] = []
    memory: list[torch.Tensor] = []
    boxes: dict[int, tuple[Box, tuple[int, ...]]] = {}
    """Of DTensors: the box, and the global shape."""
    for leaf in leaves:
        if leaf.owner is not None:
            continue
        tensor = leaf.value
        if type(tensor) is DTensor:
            local = _one_box(tensor, leaf.fqn)
            if local is None:
                continue
            tensor, box, shape = local
            boxes[len(found)] = box, shape
        elif not isinstance(tensor, torch.Tensor) or getattr(tensor, CHUNK_INFO, None) is not None:
            continue
        found.append(leaf)
        memory.append(tensor)
    runs = memory_runs(memory)
    numbers = runs.tensors.tolist()
    ends, sizes = runs.shape_ends, runs.shape_dims
    offsets, shape_dims = np.zeros_like(sizes), sizes.copy() if boxes else sizes
    for row, number in enumerate(numbers) if boxes else ():
        if number in boxes:
            box, shape = boxes[number]
            run = slice(int(ends[row]) - len(shape), int(ends[row]))
            offsets[run], shape_dims[run] = box.offsets, shape
    wanted = WantedTensors(
        [found[number] for number in numbers],
        [memory[number] for number in numbers],
        runs,
        ChunkTable(np.arange(len(numbers)), ends, offsets, sizes),
        shape_dims,
    )
    _, where, times = np.unique(runs.addresses, return_inverse=True, return_counts=True)
    return wanted.take(np.flatnonzero(times[where] == 1))


def straight_reads(wanted: WantedTensors, metadata: Metadata) -> StraightReads:
    """Those of `wanted` that are stored as one chunk of the same box, dtype and global shape."""
    entries, chunks = metadata.entries, metadata.chunks
    rows = metadata.find_shared([leaf.fqn for leaf in wanted.leaves])
    codes = {name: code for code, name in enumerate(entries.dtype_names)}
    code_of = {dtype: codes.get(dtype_name(dtype), -1) for dtype in dict.fromkeys(wanted.runs.dtypes)}
    wanted_codes = np.fromiter(map(code_of.__getitem__, wanted.runs.dtypes), np.int64, len(wanted))
    ndims = wanted.boxes.ends - starts_of(wanted.boxes.ends)
    fits = np.flatnonzero(rows >= 0)
    at = rows[fits]
    same = (entries.kinds[at] == int(EntryKind.TENSOR)) & (entries.dtype_codes[at] == wanted_codes[fits])
    fits = fits[same & (entries.ndims()[at] == ndims[fits])]
    fits = fits[_same_shapes(wanted, fits, metadata, rows[fits])]
    storage_rows = _equal_chunks(chunks, rows[fits], wanted.boxes.take(fits))
    stored = storage_rows >= 0
    return StraightReads(wanted.take(fits[stored]), storage_rows[stored])


def _one_box(tensor: DTensor, fqn: str) -> tuple[torch.Tensor, Box, tuple[int, ...]] | None:
    """The memory of the only box that this rank holds of it, the box, and the global shape; None: not one box."""
    if is_copied_view(tensor):
        return None
    try:
        shards = local_shards(tensor, key=fqn)
    except HpdcpError:  # said again, of all that are refused, when this one is looked at by itself
        return None
    if len(shards.chunks) != 1:
        return None
    return shards.view(shards.chunks[0]), shards.chunks[0].box, shards.global_shape


def _flags(where: torch.device, current: torch.device | None) -> int:
    return DIRECT if where.type == "cpu" else DIRECT | ON_DEVICE if where == current else 0


def _same_shapes(wanted: WantedTensors, which: I64, metadata: Metadata, rows: I64) -> npt.NDArray[np.bool_]:
    """Which of these wanted tensors have the global shape of these entries, of as many dimensions."""
    ends, mine = take_runs(wanted.boxes.ends, which)
    _, theirs = take_runs(metadata.entries.shape_ends, rows)
    differ = np.zeros(len(mine) + 1, dtype=np.int64)
    np.cumsum(wanted.shape_dims[mine] != metadata.entries.shape_dims[theirs], out=differ[1:])
    same: npt.NDArray[np.bool_] = differ[ends] == differ[starts_of(ends)]
    return same


def _equal_chunks(chunks: ChunkTable, entries: I64, boxes: ChunkTable) -> I64:
    """For each box the first chunk of its entry that is the same box, -1 for none; a search in all entries at once.

    Chunks of an entry are sorted by offsets, then sizes; where a foreign writer's are not, some are not found.
    """
    first = np.searchsorted(chunks.entry, entries, side="left")
    last = np.searchsorted(chunks.entry, entries, side="right")
    width = int((boxes.ends - starts_of(boxes.ends)).max(initial=0))
    wanted = _coordinates(boxes, np.arange(len(boxes)), width)
    low, high = first.copy(), last - 1
    while len(searched := np.flatnonzero(low < high)):
        middle = (low[searched] + high[searched]) // 2
        before = _is_before(_coordinates(chunks, middle, width), wanted[searched])
        low[searched[before]] = middle[before] + 1
        high[searched[~before]] = middle[~before]
    there = np.flatnonzero(first < last)
    equal = (_coordinates(chunks, low[there], width) == wanted[there]).all(axis=1)
    found = np.full(len(boxes), -1, dtype=np.int64)
    found[there[equal]] = low[there[equal]]
    return found


def _is_before(left: I64, right: I64) -> npt.NDArray[np.bool_]:
    """Row by row, whether `left` comes before `right`, the first column that differs deciding."""
    differ = left != right
    column = differ.argmax(axis=1)[:, None]
    return np.take_along_axis(left, column, axis=1)[:, 0] < np.take_along_axis(right, column, axis=1)[:, 0]


def _coordinates(boxes: ChunkTable, rows: npt.NDArray[np.integer], width: int) -> I64:
    """Row by row, offsets, then sizes, each filled up with -1 to `width`, and the number of dimensions."""
    starts = starts_of(boxes.ends)[rows]
    ndims = boxes.ends[rows] - starts
    axes = np.arange(width)
    inside = axes < ndims[:, None]
    places = (starts[:, None] + axes)[inside]
    found = np.full((len(rows), 2 * width + 1), -1, dtype=np.int64)
    found[:, :width][inside] = boxes.offsets[places]
    found[:, width:-1][inside] = boxes.sizes[places]
    found[:, -1] = ndims
    return found
