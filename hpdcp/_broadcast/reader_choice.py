"""Who reads what several ranks want: the load side of replicas.

Runs on the coordinator over all ranks' plans, as columns; a pure function of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._format.columns import (
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
from hpdcp._format.metadata import Metadata
from hpdcp._format.strings import StringColumn
from hpdcp._plan.load_plan import DIRECT, ON_DEVICE, LoadPlan, SharedColumns

STRIPE_BYTES: Final = 64 << 20
"""A shared chunk larger than this is cut by rows into parts of at most this size, each with a source of its own."""
MOST_NEW_GROUPS: Final = 64
"""Process groups that one load creates: each costs every rank a handshake, member or not."""
_LEAST_BUNDLE_BYTES: Final = 1 << 20
"""Small parts are not spread over more sources than leave each of them this much to read in one go."""

Group = tuple[int, ...]
Bools = npt.NDArray[np.bool_]


def choose_sources(
    plans: Sequence[LoadPlan],
    metadata: Metadata,
    *,
    itemsize: Callable[[str], int],
    transport: Callable[[str], str],
    shares: Callable[[Group], bool],
    exists: Callable[[Group], bool],
    batch_bytes: int,
    carries: Callable[[Group], bool] = lambda _: False,
) -> tuple[list[LoadPlan], list[Group]]:
    """The same plans, with a source for each destination chunk that several ranks want alike; and all groups of them.

    Chunks are alike when they are the same box of the same stored tensor, under whatever name. Sources are balanced by
    bytes, largest parts first, to the rank of the group with the least to read so far; what a rank reads for itself
    counts first. Small parts that follow one another go to one source together: they lie side by side in the files,
    and a store that fetches the gaps between them as well would otherwise fetch everything once for every source.

    Parts come in one total order (wider elements first, then stored name, offsets, sizes: the order of the files),
    which every rank walks: two ranks that meet in several groups never wait for each other in opposite orders.

    Args:
        itemsize: bytes of an element of the dtype of that name.
        transport: name of the dtype in which a stored dtype travels.
        shares: whether this group of ranks shares at all, rather than each of them reading for itself.
        exists: whether the group has a process group already; of the others, the `MOST_NEW_GROUPS` that save the most
            bytes share.
        batch_bytes: parts below this size are small.
        carries: whether a process group of these ranks' devices is there or can be made. Parts that all members want
            on their devices go through it, if they are small or go straight into every target: through memory of
            the device's they would take as much of it as they are large.
    """
    wanted = _Wanted(plans, metadata, itemsize)
    alike = wanted.alike().only_shared(wanted, shares, exists)
    heads = alike.heads
    parts = _Parts.of_chunks(wanted.boxes.take(heads), wanted.widths[heads], np.diff(alike.ends, prepend=0))
    sources = _sources(wanted, alike, parts, batch_bytes)
    carried = np.array([carries(group) for group in alike.groups], dtype=np.bool_)[alike.group[parts.of]]
    small = parts.nbytes < batch_bytes
    return _plans_with(plans, wanted, alike, parts, sources, metadata, transport, (carried, small)), alike.groups


class _Wanted:
    """Every rank's destination chunks, one rank after another."""

    def __init__(self, plans: Sequence[LoadPlan], metadata: Metadata, itemsize: Callable[[str], int]) -> None:
        names = list(metadata.entries.dtype_names)
        counts = np.array([len(plan.target_columns.kinds) for plan in plans], dtype=np.int64)
        self.ranks = np.repeat(np.arange(len(plans), dtype=np.int64), counts)
        self.rows = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts_of(ends_of(counts)), counts)
        self.boxes = concat_chunks([plan.target_columns.boxes for plan in plans])
        self.entries = np.concatenate([_stored_entry(plan, metadata) for plan in plans])
        """Row of the stored tensor; -1 where nothing is read for the chunk."""
        known = self.entries >= 0
        self.dtypes = np.full(len(known), -1, dtype=np.int64)
        self.dtypes[known] = metadata.entries.dtype_codes[self.entries[known]]
        sizes = np.array([itemsize(name) if name else 1 for name in names], dtype=np.int64)
        self.widths = np.ones(len(known), dtype=np.int64)
        """Bytes of a stored element."""
        self.widths[known] = sizes[self.dtypes[known]]
        self.nbytes = self.boxes.volumes() * self.widths
        owners = np.concatenate([plan.target_columns.owners for plan in plans])
        kinds = np.concatenate([plan.target_columns.kinds for plan in plans])
        said = np.concatenate([plan.target_columns.dtypes for plan in plans]) >= 0
        self.sharable = known & said & (owners < 0) & (kinds == EntryKind.TENSOR)
        flags = np.concatenate([plan.target_columns.direct for plan in plans])
        self.on_device = (flags & ON_DEVICE).astype(np.bool_)
        self.direct = (flags & DIRECT).astype(np.bool_)
        self.direct &= np.concatenate([_target_dtype(plan, names) for plan in plans]) == self.dtypes

    def alike(self) -> _Alike:
        """The chunks that several ranks want, in the total order."""
        rows = np.flatnonzero(self.sharable)
        keys = [-self.widths[rows], *self.boxes.take(rows).with_entry(self.entries[rows]).sort_keys()]
        order = sort_order(keys)
        first = group_starts(keys, order)
        ranks = self.ranks[rows]
        again = np.zeros(len(order), dtype=np.bool_)
        again[1:] = ~first[1:] & (ranks[order][1:] == ranks[order][:-1])
        if again.any():
            # A rank that wants one stored chunk twice, under two names: its second copy meets the others' second.
            number = np.empty(len(order), dtype=np.int64)
            runs = np.flatnonzero(~again)
            number[order] = np.arange(len(order)) - np.repeat(runs, np.diff(runs, append=len(order)))
            keys.append(number)
            order = sort_order(keys)
            first = group_starts(keys, order)
        starts = np.flatnonzero(first)
        lengths = np.diff(starts, append=len(order))
        several = lengths > 1
        ends, positions = take_runs(ends_of(lengths), np.flatnonzero(several))
        members = rows[order][positions]
        groups, group = _groups(self.ranks[members], ends)
        return _Alike(members, ends, groups, group)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Sets of identical chunks, in the total order."""

    members: I64
    """Rows of `_Wanted`, set by set, ranks ascending."""
    ends: I64
    groups: list[Group]
    """The ranks of sets, each once, sorted."""
    group: I64
    """For each set, its row in `groups`."""

    @property
    def heads(self) -> I64:
        """The first row of each set."""
        return self.members[starts_of(self.ends)]

    def only_shared(self, wanted: _Wanted, shares: Callable[[Group], bool], exists: Callable[[Group], bool]) -> _Alike:
        saved = np.bincount(self.group, weights=wanted.nbytes[self.heads], minlength=len(self.groups))
        agreed = [row for row, group in enumerate(self.groups) if shares(group)]
        new = [row for row in agreed if not exists(self.groups[row])]
        new.sort(key=lambda row: (-saved[row] * (len(self.groups[row]) - 1), row))
        refused = set(new[MOST_NEW_GROUPS:])
        kept = [row for row in agreed if row not in refused]
        place = np.full(len(self.groups), -1, dtype=np.int64)
        place[kept] = np.arange(len(kept))
        sets = np.flatnonzero(place[self.group] >= 0)
        ends, positions = take_runs(self.ends, sets)
        return _Alike(self.members[positions], ends, [self.groups[row] for row in kept], place[self.group[sets]])


def _groups(ranks: I64, ends: I64) -> tuple[list[Group], I64]:
    """The different runs of `ranks`, sorted, and for each run which of them it is."""
    starts = starts_of(ends)
    lengths = ends - starts
    base = int(ranks.max()) + 1 if len(ranks) else 1
    group = np.empty(len(ends), dtype=np.int64)
    seen: list[Group] = []
    for length in np.unique(lengths).tolist():
        runs = np.flatnonzero(lengths == length)
        number = np.zeros(len(runs), dtype=np.int64)
        for position in range(length):
            number = np.unique(number * base + ranks[starts[runs] + position], return_inverse=True)[1]
        first = runs[np.unique(number, return_index=True)[1]]
        group[runs] = number + len(seen)
        seen += [tuple(ranks[starts[run] : ends[run]].tolist()) for run in first.tolist()]
    in_order = sorted(range(len(seen)), key=seen.__getitem__)
    place = np.empty(len(seen), dtype=np.int64)
    place[in_order] = np.arange(len(seen))
    return [seen[row] for row in in_order], place[group]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Shared chunks, large ones cut by rows."""

    boxes: ChunkTable
    """Relative to their chunk."""
    of: I64
    """Which chunk each part is of."""
    nbytes: I64

    @classmethod
    def of_chunks(cls, chunks: ChunkTable, widths: I64, members: I64) -> _Parts:
        """The parts of `chunks`, each wanted by so many members."""
        nbytes = chunks.volumes() * widths
        cut: dict[int, list[_Cut]] = {}
        counts = np.ones(len(chunks), dtype=np.int64)
        for row in np.flatnonzero(nbytes > STRIPE_BYTES).tolist():
            total = int(nbytes[row])
            pieces = _count(total, STRIPE_BYTES, STRIPE_BYTES // 8, int(members[row]))
            cut[row] = _cuts(chunks.box(row)[1], int(widths[row]), -(-total // pieces))
            counts[row] = len(cut[row])
        of = np.repeat(np.arange(len(chunks), dtype=np.int64), counts)
        boxes = chunks.take(of)
        boxes.offsets[:] = 0
        ends = ends_of(counts)
        for row, parts in cut.items():
            for part, (offsets, sizes) in enumerate(parts, int(ends[row]) - len(parts)):
                where = slice(int(boxes.ends[part]) - len(sizes), int(boxes.ends[part]))
                boxes.offsets[where], boxes.sizes[where] = offsets, sizes
        return cls(boxes, of, boxes.volumes() * widths[of])


_Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def _cuts(sizes: tuple[int, ...], width: int, most: int) -> list[_Cut]:
    """Parts of about equal size, at most `most` bytes unless they are single elements; each one run of elements."""
    total = math.prod(sizes) * width
    if total <= most or total <= width:
        return [((0,) * len(sizes), sizes)]
    rows, rest = sizes[0], sizes[1:]
    at_once = most * rows // total
    if at_once:
        at_once = -(-rows // -(-rows // at_once))
        nowhere = (0,) * len(rest)
        return [((start, *nowhere), (min(at_once, rows - start), *rest)) for start in range(0, rows, at_once)]
    inner = _cuts(rest, width, most)
    return [((row, *offsets), (1, *part)) for row in range(rows) for offsets, part in inner]


def _count(total: int, most: int, least: int, members: int) -> int:
    """Into how many pieces to cut `total` bytes.

    So many that none is larger than `most`; and a multiple of `members`, as far as that leaves each piece `least`.
    """
    count = -(-total // max(most, 1))
    return max(count, min(-(-count // members) * members, total // max(least, 1)), 1)


def _sources(wanted: _Wanted, alike: _Alike, parts: _Parts, batch_bytes: int) -> I64:
    """The rank that reads each part."""
    alone = np.ones(len(wanted.ranks), dtype=np.bool_)
    alone[alike.members] = False
    ranks = max([int(wanted.ranks.max()) if len(wanted.ranks) else 0, *(group[-1] for group in alike.groups)]) + 1
    load = np.bincount(wanted.ranks[alone], weights=wanted.nbytes[alone], minlength=ranks).astype(np.int64).tolist()
    group = alike.group[parts.of]
    bundle, count = _bundles(group, wanted.dtypes[alike.heads][parts.of], parts.nbytes, alike.groups, batch_bytes)
    nbytes = np.bincount(bundle, weights=parts.nbytes, minlength=count).astype(np.int64)
    group_of = np.empty(count, dtype=np.int64)
    group_of[bundle] = group
    chosen = np.zeros(count, dtype=np.int64)
    for number in np.argsort(-nbytes, kind="stable").tolist():
        source = min(alike.groups[group_of[number]], key=load.__getitem__)
        load[source] += int(nbytes[number])
        chosen[number] = source
    return chosen[bundle]


def _bundles(group: I64, dtype: I64, nbytes: I64, groups: Sequence[Group], batch_bytes: int) -> tuple[I64, int]:
    """For each part the bundle that one source reads, numbered in the order of the parts; and how many there are.

    A part that is not small is its own. Small ones of one group and dtype are cut, in order, into bundles of about
    equal size.
    """
    label = np.arange(len(nbytes), dtype=np.int64)
    small = np.flatnonzero(nbytes < batch_bytes)
    order = small[sort_order([group[small], dtype[small]])]
    kinds = [group[order], dtype[order]]
    first = group_starts(kinds, np.arange(len(order)))
    starts = np.flatnonzero(first)
    for start, length in zip(starts.tolist(), np.diff(starts, append=len(order)).tolist(), strict=True):
        run = order[start : start + length]
        before = np.cumsum(nbytes[run]) - nbytes[run]
        total = int(nbytes[run].sum())
        count = _count(total, batch_bytes, _LEAST_BUNDLE_BYTES, len(groups[int(group[run[0]])]))
        within = before * count // max(total, 1)
        label[run] = run[np.searchsorted(within, within)]
    return np.unique(label, return_inverse=True)[1].astype(np.int64), len(np.unique(label))


def _plans_with(
    plans: Sequence[LoadPlan],
    wanted: _Wanted,
    alike: _Alike,
    parts: _Parts,
    sources: I64,
    metadata: Metadata,
    transport: Callable[[str], str],
    device: tuple[Bools, Bools],
) -> list[LoadPlan]:
    """Each rank's own parts, in the total order; `device` says of each whether its group has one, and is it small."""
    stored = [name for name in metadata.entries.dtype_names if name]
    names = sorted({*stored, *map(transport, stored)})
    code = {name: row for row, name in enumerate(names)}
    stored_code = np.array([code.get(name, -1) for name in metadata.entries.dtype_names], dtype=np.int32)
    wire_code = np.array([code[transport(n)] if n else -1 for n in metadata.entries.dtype_names], dtype=np.int32)

    ends, positions = take_runs(alike.ends, parts.of)
    rows = alike.members[positions]
    lengths = ends - starts_of(ends)
    part = np.repeat(np.arange(len(parts.of)), lengths)
    direct = np.logical_and.reduceat(wanted.direct[rows], starts_of(ends)) if len(rows) else np.zeros(0, np.bool_)
    on_device = np.logical_and.reduceat(wanted.on_device[rows], starts_of(ends)) if len(rows) else direct
    carried, small = device
    flags = np.where(direct, DIRECT, 0) | np.where(on_device & carried & (direct | small), ON_DEVICE, 0)
    by_rank = np.argsort(wanted.ranks[rows], kind="stable")
    cuts = np.searchsorted(wanted.ranks[rows][by_rank], np.arange(len(plans) + 1)).tolist()
    part = part[by_rank]
    boxes = parts.boxes.take(part).with_entry(wanted.rows[rows[by_rank]])
    dtype = wanted.dtypes[alike.heads][parts.of][part]
    group = alike.group[parts.of][part]
    members = [np.array(ranks, dtype=np.int64) for ranks in alike.groups]
    dtype_names = StringColumn.from_strings(names)
    found = []
    for plan, (start, stop) in zip(plans, itertools.pairwise(cuts), strict=True):
        mine = slice(start, stop)
        # Only the rank's own groups: all of them to every rank would be ranks squared.
        own_groups, own_group = np.unique(group[mine], return_inverse=True)
        own_members = [members[row] for row in own_groups.tolist()]
        shared = SharedColumns(
            _rows_between(boxes, start, stop),
            own_group.astype(np.int64),
            sources[part[mine]],
            stored_code[dtype[mine]],
            wire_code[dtype[mine]],
            flags[part[mine]].astype(np.uint8),
            dtype_names,
            ends_of(np.array([len(ranks) for ranks in own_members], dtype=np.int64)),
            np.concatenate([np.zeros(0, dtype=np.int64), *own_members]),
        )
        found.append(plan.with_shared(shared))
    return found


def _rows_between(boxes: ChunkTable, start: int, stop: int) -> ChunkTable:
    """Rows `start` to `stop`, in steps that follow their number, not that of all rows."""
    first, last = (int(boxes.ends[row - 1]) if row else 0 for row in (start, stop))
    return ChunkTable(
        boxes.entry[start:stop], boxes.ends[start:stop] - first, boxes.offsets[first:last], boxes.sizes[first:last]
    )


def _stored_entry(plan: LoadPlan, metadata: Metadata) -> I64:
    """For each destination chunk, the row of the stored tensor; -1 where nothing is read for it."""
    found = np.full(len(plan.target_columns.kinds), -1, dtype=np.int64)
    rows = plan.item_columns.storage_row
    if len(rows):
        found[plan.item_columns.boxes.entry] = metadata.chunks.entry[rows]
    return found


def _target_dtype(plan: LoadPlan, names: Sequence[str]) -> I64:
    """For each destination chunk, the row in `names` of the target's dtype; -2 where it is none of them."""
    code = {name: row for row, name in enumerate(names)}
    mine = np.array([*(code.get(name, -2) for name in plan.dtype_names), -2], dtype=np.int64)
    found: I64 = mine[plan.target_columns.dtypes]
    return found
