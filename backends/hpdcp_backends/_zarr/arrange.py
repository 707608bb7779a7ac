"""The ranks' plans cut along each tensor's grid of chunks, and which rank sends what to which."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hpdcp._base.errors import StateDictError
from hpdcp._format.columns import (
    I64,
    ChunkTable,
    EntryKind,
    EntryTable,
    concat_chunks,
    sort_order,
    starts_of,
    take_runs,
)
from hpdcp._format.metadata import Metadata
from hpdcp._plan.save_plan import Redistribution, SavePlan
from hpdcp._plan.whole_plan import entry_rows
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.geometry import Box
from hpdcp._state.paths import decode_path
from hpdcp_backends._zarr.grid import Cell, cells, chunk_shape
from hpdcp_backends._zarr.names import node_path

STEPS = "zarr.steps"
"""The note that says, for each dimension of each entry (as `EntryTable.shape_dims`), how long its chunks are."""


def steps_of(plan: SavePlan, entry: int) -> tuple[int, ...]:
    """The grid's steps of one of the plan's entries, as `arrange` noted them."""
    ends = plan.entries.shape_ends
    return tuple(plan.notes[STEPS][starts_of(ends)[entry] : ends[entry]].tolist())


def paths_of(entries: EntryTable, kind: EntryKind = EntryKind.TENSOR) -> Iterator[tuple[int, str]]:
    """(row, where its node is) of each entry of a kind."""
    for row in np.flatnonzero(entries.kinds == kind).tolist():
        owner = int(entries.owners[row])
        yield row, node_path(decode_path(entries.paths[row]), None if owner < 0 else owner)


@dataclass(slots=True)
class _RankWork:
    """What one rank does, in rows of entries that all ranks share."""

    items: list[tuple[int, Box, int]] = field(default_factory=list)
    """(entry, box, bytes)."""
    sent: list[tuple[int, Box]] = field(default_factory=list)
    sent_bytes: int = 0
    received: list[tuple[int, int, Box, int, int]] = field(default_factory=list)
    """(item, entry, box, sender, offset)."""
    load: int = 0


def arrange(plans: Sequence[SavePlan], metadata: Metadata) -> tuple[list[SavePlan], Metadata]:
    """The plans with the chunks of each tensor's grid as items, and the metadata of these.

    A chunk goes to the rank that holds all of it. One that several hold boxes of goes to one of them that holds much of
    it, the one with the least to write so far, and the others send it their boxes.

    Raises:
        StateDictError: a tensor's name is the beginning of another's, as that of a group of a hierarchy is.
    """
    entries = metadata.entries
    _check_names(entries)
    rows = entry_rows(metadata, plans)
    chunks = concat_chunks(
        [plan.chunks.with_entry(row[plan.chunks.entry]) for plan, row in zip(plans, rows, strict=True)]
    )
    ranks = np.repeat(np.arange(len(plans)), [len(plan) for plan in plans])
    nbytes = np.concatenate([plan.nbytes for plan in plans])
    order = np.lexsort((ranks, chunks.entry))
    bounds = np.searchsorted(chunks.entry[order], np.arange(len(entries) + 1)).tolist()
    works = [_RankWork() for _ in plans]
    made: list[tuple[int, Box]] = []
    steps = np.maximum(entries.shape_dims, 1)
    starts = starts_of(entries.shape_ends)
    for entry, (start, stop) in enumerate(itertools.pairwise(bounds)):
        members = order[start:stop]
        if entries.kinds[entry] != EntryKind.TENSOR:
            for member in members.tolist():
                works[int(ranks[member])].items.append((entry, Box((), ()), int(nbytes[member])))
                made.append((entry, Box((), ())))
            continue
        shape, itemsize = entries.shape(entry), itemsize_of(entries, entry)
        offsets, sizes = _boxes(chunks, members, len(shape))
        found = chunk_shape(shape, itemsize, offsets, sizes)
        steps[starts[entry] : entries.shape_ends[entry]] = found
        for cell in cells(shape, found, offsets, sizes) if len(members) else ():
            made.append((entry, cell.box))
            _assign(works, entry, cell, ranks[members], itemsize)
    table = ChunkTable.from_boxes([entry for entry, _ in made], [(box.offsets, box.sizes) for _, box in made])
    table = table.take(sort_order(table.sort_keys()))
    arranged = [_plan(plan, work, row, steps, entries) for plan, work, row in zip(plans, works, rows, strict=True)]
    return arranged, Metadata(entries, table, settings=metadata.settings)


def itemsize_of(entries: EntryTable, row: int) -> int:
    """Bytes of an element of a tensor on record."""
    return dtype_of(entries.dtype(row)).itemsize


def _check_names(entries: EntryTable) -> None:
    nodes = {path: row for row, path in paths_of(entries)}
    for path, row in nodes.items():
        steps = path.split("/")
        for depth in range(1, len(steps)):
            above = nodes.get("/".join(steps[:depth]))
            if above is not None:
                raise StateDictError(
                    f"{entries.fqns[above]!r} is a tensor and {entries.fqns[row]!r} lies below it: in zarr an array "
                    "holds no arrays. Rename one of them, or save in layout 'safetensors'."
                )


def _boxes(chunks: ChunkTable, rows: npt.NDArray[np.intp], ndim: int) -> tuple[I64, I64]:
    taken = chunks.take(rows)
    return taken.offsets.reshape(len(rows), ndim), taken.sizes.reshape(len(rows), ndim)


def _assign(works: Sequence[_RankWork], entry: int, cell: Cell, ranks: npt.NDArray[np.intp], itemsize: int) -> None:
    nbytes = cell.box.volume * itemsize
    if cell.holder >= 0:
        work = works[int(ranks[cell.holder])]
        work.items.append((entry, cell.box, nbytes))
        work.load += nbytes
        return
    held: dict[int, int] = {}
    holders: dict[Box, int] = {}
    for row, box in cell.held:
        if box not in holders:
            holders[box] = rank = int(ranks[row])
            held[rank] = held.get(rank, 0) + box.volume
    most = max(held.values())
    writer = min((rank for rank, volume in held.items() if 2 * volume >= most), key=lambda rank: works[rank].load)
    target = works[writer]
    target.load += nbytes
    for box, rank in holders.items():
        sender = works[rank]
        target.received.append((len(target.items), entry, box, rank, sender.sent_bytes))
        sender.sent.append((entry, box))
        sender.sent_bytes += box.volume * itemsize
    target.items.append((entry, cell.box, nbytes))


def _plan(
    plan: SavePlan,
    work: _RankWork,
    rows: I64,
    steps: I64,
    entries: EntryTable,
) -> SavePlan:
    """The rank's plan, in rows of its own entries."""
    own = dict(zip(rows.tolist(), range(len(rows)), strict=True))
    _, dims = take_runs(entries.shape_ends, rows)
    redistribution = None
    if work.sent or work.received:
        redistribution = Redistribution(
            _table([(own[entry], box) for entry, box in work.sent]),
            _table([(own[entry], box) for _, entry, box, _, _ in work.received]),
            np.array([item for item, *_ in work.received], dtype=np.int64),
            np.array([sender for *_, sender, _ in work.received], dtype=np.int64),
            np.array([offset for *_, offset in work.received], dtype=np.int64),
        )
    return SavePlan(
        plan.entries,
        _table([(own[entry], box) for entry, box, _ in work.items]),
        np.array([nbytes for *_, nbytes in work.items], dtype=np.int64),
        plan.storage_data,
        redistribution=redistribution,
        notes={STEPS: steps[dims]},
    )


def _table(boxes: Sequence[tuple[int, Box]]) -> ChunkTable:
    return ChunkTable.from_boxes([entry for entry, _ in boxes], [(box.offsets, box.sizes) for _, box in boxes])
