"""Who reads what several ranks want: the load side of replicas.

Runs on the coordinator over all ranks' plans, as columns; a pure function of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp.container import StringColumn
from hpdcp.load_plan import LoadPlan, SharedColumns
from hpdcp.metadata import Metadata
from hpdcp.tables import (
    I64,
    ChunkTable,
    EntryKind,
    concat_chunks,
    ends_of,
    group_starts,
    sort_order,
    starts_of,
    take_runs,
)

STRIPE_BYTES: Final = 64 << 20
"""A shared chunk larger than this is cut by rows into parts of about this size, each with a source of its own."""
MOST_NEW_GROUPS: Final = 64
"""Process groups that one load creates: each costs every rank a handshake, member or not."""

Group = tuple[int, ...]


def choose_sources(
    plans: Sequence[LoadPlan],
    metadata: Metadata,
    *,
    itemsize: Callable[[str], int],
    transport: Callable[[str], str],
    shares: Callable[[Group], bool],
    exists: Callable[[Group], bool],
) -> list[LoadPlan]:
    """The same plans, with a source for each destination chunk that several ranks want alike.

    Sources are balanced by bytes, largest parts first, to the rank of the group with the least to read so far; what a
    rank reads for itself counts first. Parts come in one total order (wider elements first, then fqn, offsets, sizes:
    the order of the files), which every rank walks: two ranks that meet in several groups never wait for each other
    in opposite orders.

    Args:
        itemsize: bytes of an element of the dtype of that name.
        transport: name of the dtype in which a stored dtype travels.
        shares: whether this group of ranks shares at all, rather than each of them reading for itself.
        exists: whether the group has a process group already; the others count as new.
    """
    wanted = _Wanted(plans, metadata, itemsize)
    chosen, groups = wanted.choose(shares, exists)
    return wanted.plans_with(chosen, groups, transport)


class _Wanted:
    """Every rank's destination chunks side by side, the same ones next to each other."""

    def __init__(self, plans: Sequence[LoadPlan], metadata: Metadata, itemsize: Callable[[str], int]) -> None:
        self._plans = plans
        self._dtype_names = list(metadata.entries.dtype_names)
        sizes = np.array([itemsize(name) if name else 1 for name in self._dtype_names], dtype=np.int64)
        names, boxes = _common_names(plans)
        counts = np.array([len(plan.target_columns.kinds) for plan in plans], dtype=np.int64)
        self._ranks = np.repeat(np.arange(len(plans), dtype=np.int64), counts)
        self._rows = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts_of(ends_of(counts)), counts)
        self._boxes = boxes
        stored = np.concatenate([_stored_dtype(plan, metadata) for plan in plans])
        self._stored = stored
        alike, direct = [], []
        for plan in plans:
            code = {name: i for i, name in enumerate(self._dtype_names)}
            mine = np.array([*(code.get(name, -1) for name in plan.dtype_names), -2], dtype=np.int64)
            alike.append(mine[plan.target_columns.dtypes])
            direct.append(plan.target_columns.direct.astype(np.bool_))
        self._said = np.concatenate([plan.target_columns.dtypes for plan in plans]) >= 0
        self._direct = np.concatenate(direct) & (np.concatenate(alike) == stored)
        self._itemsize = np.where(stored >= 0, sizes[np.maximum(stored, 0)], 1)
        self._nbytes = boxes.volumes() * self._itemsize
        owners = np.concatenate([plan.target_columns.owners for plan in plans])
        kinds = np.concatenate([plan.target_columns.kinds for plan in plans])
        self._sharable = (owners < 0) & (kinds == EntryKind.TENSOR) & (stored >= 0) & self._said
        self._sort(names)

    def _sort(self, names: Sequence[str]) -> None:
        """Rows in the total order; `self._starts` is where a group of identical chunks begins, its ranks ascending."""
        in_order = sorted(range(len(names)), key=names.__getitem__)
        place = np.empty(len(names), dtype=np.int64)
        place[in_order] = np.arange(len(names), dtype=np.int64)
        boxes = self._boxes.with_entry(place[self._boxes.entry])
        keys: list[I64] = [-self._itemsize, *boxes.sort_keys(), (~self._sharable).astype(np.int64)]
        self._order = sort_order(keys)
        self._starts = np.flatnonzero(group_starts(keys, self._order))
        self._lengths = np.diff(self._starts, append=len(self._order))

    def choose(
        self, shares: Callable[[Group], bool], exists: Callable[[Group], bool]
    ) -> tuple[npt.NDArray[np.intp], list[Group]]:
        """Which groups of identical chunks are shared, and the ranks of each of them."""
        first = self._order[self._starts]
        candidates = np.flatnonzero((self._lengths > 1) & self._sharable[first])
        ranks = self._ranks[self._order].tolist()
        spans = zip(self._starts[candidates].tolist(), self._lengths[candidates].tolist(), strict=True)
        members = [tuple(ranks[start : start + length]) for start, length in spans]
        agreed = {group: shares(group) for group in set(members)}
        saved: dict[Group, int] = {}
        for group, nbytes in zip(members, self._nbytes[first[candidates]].tolist(), strict=True):
            if agreed[group]:
                saved[group] = saved.get(group, 0) + nbytes * (len(group) - 1)
        new = sorted((group for group in saved if not exists(group)), key=lambda group: (-saved[group], group))
        refused = set(new[MOST_NEW_GROUPS:])
        kept = [i for i, group in enumerate(members) if agreed[group] and group not in refused]
        return candidates[kept], [members[i] for i in kept]

    def plans_with(
        self, chosen: npt.NDArray[np.intp], members: Sequence[Group], transport: Callable[[str], str]
    ) -> list[LoadPlan]:
        heads = self._order[self._starts[chosen]]
        parts = _Parts(self._boxes.take(heads), self._itemsize[heads])
        sources = self._sources(chosen, members, parts)
        groups = sorted(set(members))
        group_row = {group: row for row, group in enumerate(groups)}
        names = sorted({name for name in self._dtype_names if name} | {transport(n) for n in self._dtype_names if n})
        code = {name: row for row, name in enumerate(names)}
        stored_code = np.array([code.get(name, -1) for name in self._dtype_names], dtype=np.int32)
        transport_code = np.array([code[transport(n)] if n else -1 for n in self._dtype_names], dtype=np.int32)

        ends, positions = take_runs(ends_of(self._lengths), chosen[parts.of])
        rows = self._order[positions]
        part = np.repeat(np.arange(len(parts.of)), self._lengths[chosen[parts.of]])
        direct = np.minimum.reduceat(self._direct[rows], starts_of(ends)) if len(rows) else np.zeros(0, dtype=np.bool_)
        by_rank = np.argsort(self._ranks[rows], kind="stable")
        cuts = np.searchsorted(self._ranks[rows][by_rank], np.arange(len(self._plans) + 1))
        group_of_part = np.array([group_row[members[i]] for i in parts.of.tolist()], dtype=np.int64)
        stored = self._stored[heads][parts.of]
        group_ends = ends_of(np.array([len(group) for group in groups], dtype=np.int64))
        group_ranks = np.array([rank for group in groups for rank in group], dtype=np.int64)
        dtype_names = StringColumn.from_strings(names)
        plans = []
        for rank, plan in enumerate(self._plans):
            mine = by_rank[cuts[rank] : cuts[rank + 1]]
            own = part[mine]
            plans.append(
                plan.with_shared(
                    SharedColumns(
                        parts.boxes.take(own).with_entry(self._rows[rows[mine]]),
                        group_of_part[own],
                        sources[own],
                        stored_code[stored[own]],
                        transport_code[stored[own]],
                        direct[own].astype(np.uint8),
                        dtype_names,
                        group_ends,
                        group_ranks,
                    )
                )
            )
        return plans

    def _sources(self, chosen: npt.NDArray[np.intp], members: Sequence[Group], parts: _Parts) -> I64:
        shared = np.zeros(len(self._order), dtype=np.bool_)
        shared[take_runs(ends_of(self._lengths), chosen)[1]] = True
        alone = self._order[~shared]
        load = np.bincount(self._ranks[alone], weights=self._nbytes[alone], minlength=len(self._plans)).tolist()
        nbytes = parts.nbytes.tolist()
        of = parts.of.tolist()
        sources = np.zeros(len(of), dtype=np.int64)
        for number in np.argsort(-parts.nbytes, kind="stable").tolist():
            source = min(members[of[number]], key=load.__getitem__)
            load[source] += nbytes[number]
            sources[number] = source
        return sources


class _Parts:
    """Shared chunks, large ones cut by rows; boxes are relative to their chunk."""

    def __init__(self, chunks: ChunkTable, itemsize: I64) -> None:
        boxes, of, nbytes = [], [], []
        for row in range(len(chunks)):
            _, sizes = chunks.box(row)
            width = int(itemsize[row])
            for offsets, part in _row_parts(sizes, width):
                boxes.append((offsets, part))
                of.append(row)
                volume = width
                for size in part:
                    volume *= size
                nbytes.append(volume)
        self.boxes = ChunkTable.from_boxes([0] * len(boxes), boxes)
        self.of = np.array(of, dtype=np.int64)
        """Which chunk each part is of."""
        self.nbytes = np.array(nbytes, dtype=np.int64)


def _row_parts(sizes: tuple[int, ...], itemsize: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    total = itemsize
    for size in sizes:
        total *= size
    nowhere = (0,) * len(sizes)
    if total <= STRIPE_BYTES:
        return [(nowhere, sizes)]
    axis = next(axis for axis, size in enumerate(sizes) if size > 1)
    rows = max(1, sizes[axis] * STRIPE_BYTES // total)
    return [
        (
            (*nowhere[:axis], start, *nowhere[axis + 1 :]),
            (*sizes[:axis], min(rows, sizes[axis] - start), *sizes[axis + 1 :]),
        )
        for start in range(0, sizes[axis], rows)
    ]


def _common_names(plans: Sequence[LoadPlan]) -> tuple[list[str], ChunkTable]:
    """Every name once, and all ranks' destination chunks with rows of it as their entries."""
    ids: dict[str, int] = {}
    seen: dict[tuple[bytes, bytes], I64] = {}
    tables = []
    for plan in plans:
        # Most ranks have the very same names; looking each of them up again for every rank would take most of the time.
        same = (plan.names.blob.tobytes(), plan.names.ends.tobytes())
        if same not in seen:
            seen[same] = np.array([ids.setdefault(name, len(ids)) for name in plan.names], dtype=np.int64)
        boxes = plan.target_columns.boxes
        tables.append(boxes.with_entry(seen[same][boxes.entry]))
    return list(ids), concat_chunks(tables)


def _stored_dtype(plan: LoadPlan, metadata: Metadata) -> I64:
    """For each destination chunk, the row of its stored dtype's name; -1 where nothing is read for it."""
    found = np.full(len(plan.target_columns.kinds), -1, dtype=np.int64)
    rows = plan.item_columns.storage_row
    if len(rows):
        found[plan.item_columns.boxes.entry] = metadata.entries.dtype_codes[metadata.chunks.entry[rows]]
    return found
