"""Ranks that hold the same thing: who writes it, and whether they really agree.

Runs on the coordinator over all ranks' plans, as columns. Everything here is a pure function of the plans, so that
it gives the same answer wherever it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._base.config import ReplicaCheck
from hpdcp._base.errors import ReplicaMismatchError, StateDictError
from hpdcp._format.columns import (
    I64,
    ChunkTable,
    EntryKind,
    EntryTable,
    column,
    concat_chunks,
    ends_of,
    group_starts,
    sort_order,
    starts_of,
    take_runs,
)
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import Metadata, StorageTable
from hpdcp._plan._merged_names import MergedNames, merge_names
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.whole_plan import WholePlan, join_results
from hpdcp._plan.write_results import WriteResults
from hpdcp._state.coverage import missing
from hpdcp._state.geometry import Box, intersect
from hpdcp._state.mismatches import listed

SMALL_REPLICA_BYTES: Final = 1 << 20
"""Up to here a replica is compared when `check_replicas` is "small"."""
SPLIT_BYTES: Final = 64 << 20
"""A replica is split among its holders only above this; no part is planned much smaller."""
_MANY_HOLDERS: Final = 16
"""From here on numpy finds the least loaded holder faster than Python does."""
_MOST_NAMED: Final = 20


def drop_duplicates(
    plans: Sequence[SavePlan], *, remove_redundancy: bool, to_minimum_rank: bool, whole: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Each rank's part, every box in exactly one of them, and the metadata of all.

    A box that one rank holds is that rank's. One that several hold goes, largest first, to the holder with the fewest
    bytes so far (`to_minimum_rank`: to the lowest). One that is larger than `SPLIT_BYTES` and than a rank's fair share
    of all bytes is split by rows first, into parts that go the same way. Without `remove_redundancy` every holder
    writes its own copy. `whole`: the plans are those of all ranks, so that what they lack nobody has.

    Raises:
        StateDictError: ranks disagree on a key's kind, dtype or global shape, or together leave a hole in a tensor.
    """
    merged = merge_names(plans)
    items = _Items.of(merged)
    order, first = items.sorted()
    if remove_redundancy:
        if not to_minimum_rank:
            pieces = _pieces(items, order, first, len(plans))
            if pieces is not None:
                items = items.split(pieces)
                order, first = items.sorted()
        chosen = order[_writers(items.ranks[order], items.nbytes[order], first, len(plans), to_minimum_rank)]
    else:
        chosen = order
    if whole:
        _check_holes(merged.entries, items.chunks.take(order[first]))
    chunks = items.chunks.take(chosen)
    written = items.parts(merged.plans, chosen)
    return written, Metadata(merged.entries, chunks, settings={"world_size": str(len(plans))})


def merge_rank_metadata(parts: Sequence[Metadata]) -> Metadata:
    """What ranks recorded each for itself, as one; boxes that several of them stored are all there.

    Raises:
        StateDictError: ranks mean different things by one key.
    """
    merged = merge_names([SavePlan(part.entries, part.chunks, part.storage.length) for part in parts])
    items = _Items.of(merged)
    metadata = Metadata(merged.entries, items.chunks.take(items.sorted()[0]), settings=parts[0].settings)
    results = [WriteResults(part.storage) for part in parts]
    for rank, rows in merged.sources.items():
        results[rank] = results[rank].take(rows)
    joined = join_results(WholePlan.of(metadata, merged.plans, merged.plans), results)
    return metadata.with_storage(joined.table, {})


@dataclass(frozen=True, slots=True)
class _Items:
    """The items of all ranks, rank by rank, of entries they share."""

    chunks: ChunkTable
    ranks: I64
    nbytes: I64
    row: I64
    """Of the plan of its rank; for a part, of the item it is a part of."""
    is_part: npt.NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, merged: MergedNames) -> _Items:
        plans = merged.plans
        counts = np.array([len(plan) for plan in plans], dtype=np.int64)
        return cls(
            concat_chunks(
                [plan.chunks.with_entry(row[plan.chunks.entry]) for plan, row in zip(plans, merged.rows, strict=True)]
            ),
            np.repeat(np.arange(len(plans), dtype=np.int64), counts),
            np.concatenate([plan.nbytes for plan in plans]) if plans else np.zeros(0, dtype=np.int64),
            np.concatenate([np.arange(count) for count in counts.tolist()]) if plans else np.zeros(0, dtype=np.int64),
        )

    def sorted(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """The order by entry and box, holders of one box by rank; and where, in that order, another box starts."""
        keys = self.chunks.sort_keys()
        order = sort_order(keys)
        return order, group_starts(keys, order)

    def split(self, pieces: I64) -> _Items:
        """With each item as so many parts, by rows."""
        source = np.repeat(np.arange(len(pieces)), pieces)
        chunks, nbytes = self.chunks.take(source), self.nbytes[source]
        number = np.arange(len(source)) - np.repeat(starts_of(ends_of(pieces)), pieces)
        is_part = pieces[source] > 1
        starts = starts_of(chunks.ends)
        for i in np.flatnonzero(is_part).tolist():
            sizes = chunks.sizes[int(starts[i]) : int(chunks.ends[i])]
            axis = int(np.argmax(sizes > 1))
            rows, parts = int(sizes[axis]), int(pieces[source[i]])
            begin, end = rows * int(number[i]) // parts, rows * (int(number[i]) + 1) // parts
            chunks.offsets[int(starts[i]) + axis] += begin
            nbytes[i] = int(nbytes[i]) // rows * (end - begin)
            sizes[axis] = end - begin
        return _Items(chunks, self.ranks[source], nbytes, self.row[source], is_part)

    def parts(self, plans: Sequence[SavePlan], chosen: npt.NDArray[np.intp]) -> list[SavePlan]:
        """Each rank's plan: its items among `chosen`."""
        keep = np.zeros(len(self.ranks), dtype=np.bool_)
        keep[chosen] = True
        bounds = np.searchsorted(self.ranks, np.arange(len(plans) + 1)).tolist()
        return [
            self._part(plan, start, np.flatnonzero(keep[start:stop]) + start, stop)
            for plan, start, stop in zip(plans, bounds[:-1], bounds[1:], strict=True)
        ]

    def _part(self, plan: SavePlan, start: int, kept: npt.NDArray[np.intp], stop: int) -> SavePlan:
        if self.is_part is None or not self.is_part[start:stop].any():
            return plan.select(self.row[kept])
        split = np.flatnonzero(self.is_part[start:stop]) + start
        return SavePlan(
            plan.entries,
            self.chunks.take(kept).with_entry(plan.chunks.entry[self.row[kept]]),
            self.nbytes[kept],
            plan.storage_data,
            split=self.chunks.take(split).with_entry(plan.chunks.entry[self.row[split]]),
        )


def _pieces(items: _Items, order: npt.NDArray[np.intp], first: npt.NDArray[np.bool_], world_size: int) -> I64 | None:
    """Into how many parts each item is split, so that no box alone unbalances the plan; None where none is."""
    starts = np.flatnonzero(first)
    holders = np.diff(starts, append=len(first))
    nbytes = items.nbytes[order[starts]]
    most = max(SPLIT_BYTES, -(-int(nbytes.sum()) // world_size))
    pieces: I64 | None = None
    for group in np.flatnonzero((holders > 1) & (nbytes > most)).tolist():
        members = order[starts[group] : starts[group] + holders[group]]
        rows = next((size for size in items.chunks.box(int(members[0]))[1] if size > 1), 1)
        count = min(int(holders[group]), rows, -(-int(nbytes[group]) // most))
        if count > 1:
            pieces = np.ones(len(order), dtype=np.int64) if pieces is None else pieces
            pieces[members] = count
    return pieces


def _writers(
    ranks: I64, nbytes: I64, first: npt.NDArray[np.bool_], world_size: int, to_minimum_rank: bool
) -> npt.NDArray[np.intp]:
    """For each group of identical boxes (they start where `first`), the position of the holder that writes it."""
    starts = np.flatnonzero(first)
    sizes = np.diff(starts, append=len(first))
    writers = starts.copy()
    if to_minimum_rank:
        return writers  # rows of a group are in order of rank
    load = np.bincount(ranks[starts[sizes == 1]], weights=nbytes[starts[sizes == 1]], minlength=world_size)
    shared = np.flatnonzero(sizes > 1)
    shared = shared[np.argsort(-nbytes[starts[shared]], kind="stable")]
    few = load.tolist()
    holders = ranks.tolist()
    for group, start, size, weight in zip(
        shared.tolist(), starts[shared].tolist(), sizes[shared].tolist(), nbytes[starts[shared]].tolist(), strict=True
    ):
        if size < _MANY_HOLDERS:
            best = min(range(start, start + size), key=lambda row: few[holders[row]])
        else:
            best = start + int(load[ranks[start : start + size]].argmin())
        few[holders[best]] += weight
        load[holders[best]] += weight
        writers[group] = best
    return writers


def _check_holes(entries: EntryTable, chunks: ChunkTable) -> None:
    """The distinct boxes of each tensor must cover all of it: a hole could never be loaded again."""
    # Boxes that overlap may have the right volume and leave a hole, so coordinates are measured by numbers at random:
    # then only boxes that cover everything once add up, and the few tensors that do not are looked at one by one.
    axes = _axes(chunks.ends)
    lengths = _random_of(axes, chunks.offsets + chunks.sizes) - _random_of(axes, chunks.offsets)
    covered = np.zeros(len(entries), dtype=np.int64)
    np.add.at(covered, chunks.entry, replace(chunks, sizes=lengths).volumes())
    axes = _axes(entries.shape_ends)
    spans = _random_of(axes, entries.shape_dims) - _random_of(axes, np.zeros_like(entries.shape_dims))
    tensors = entries.kinds == EntryKind.TENSOR
    doubtful = np.flatnonzero(tensors & (covered != replace(entries, shape_dims=spans).volumes()))
    holes: list[str] = []
    for row in doubtful.tolist():
        first, last = np.searchsorted(chunks.entry, [row, row + 1]).tolist()
        shape = entries.shape(row)
        hole = missing(Box((0,) * len(shape), shape), [Box(*chunks.box(i)) for i in range(first, last)])
        if hole is not None:
            stop = tuple(a + b for a, b in zip(hole.offsets, hole.sizes, strict=True))
            holes.append(f"{entries.fqns[row]!r} of shape {list(shape)} lacks {list(hole.offsets)} to {list(stop)}")
    if holes:
        raise StateDictError(
            f"no rank holds all of {len(holes)} tensors: {listed(holes, most=_MOST_NAMED, separator='; ')}. "
            "Every rank of a tensor's mesh must save, with its shard."
        )


def _axes(ends: I64) -> I64:
    """Which axis each coordinate of these runs belongs to."""
    starts = starts_of(ends)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) - np.repeat(starts, ends - starts)


def _random_of(axes: I64, coordinates: I64) -> I64:
    """A number for each (axis, coordinate), always the same one, that looks drawn at random (splitmix64)."""
    x = coordinates.astype(np.uint64) * np.uint64(64) + axes.astype(np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


class ReplicaReport:
    """What one rank holds and did not write: rows of its `held_boxes`, and the checksums of each."""

    def __init__(self, rows: I64, crc_ends: I64, crcs: npt.NDArray[np.uint32], nbytes: I64) -> None:
        self.rows = rows
        self.crc_ends = crc_ends
        self.crcs = crcs
        self.nbytes = nbytes

    @classmethod
    def build(cls, rows: Sequence[int], checksums: Sequence[Sequence[int]], nbytes: Sequence[int]) -> ReplicaReport:
        return cls(
            np.array(rows, dtype=np.int64),
            ends_of(np.array([len(crcs) for crcs in checksums], dtype=np.int64)),
            np.array([crc for crcs in checksums for crc in crcs], dtype=np.uint32),
            np.array(nbytes, dtype=np.int64),
        )

    def to_bytes(self) -> bytes:
        columns: dict[str, npt.NDArray[np.generic]] = {
            "rows": self.rows,
            "crc.ends": self.crc_ends,
            "crcs": self.crcs,
            "nbytes": self.nbytes,
        }
        return pack_columns(columns, {})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> ReplicaReport:
        columns, _ = unpack_columns(data, where="a rank's replica report")
        return cls(
            column(columns, "rows", np.int64),
            column(columns, "crc.ends", np.int64),
            column(columns, "crcs", np.uint32),
            column(columns, "nbytes", np.int64),
        )


def left_to_others(held: SavePlan, local: SavePlan, final: SavePlan, check: ReplicaCheck) -> list[int]:
    """Rows of `held` (a rank's `held_boxes`) that another rank writes and that `check` asks to compare.

    `final` may hold the items in another order, or parts of them: what it has no identical item for was left to others.
    A box that its holders write a part each of comes as those parts.
    """
    if check == "off" or len(local) == 0:
        return []
    left = held.entries.owners[held.chunks.entry] < 0
    if check == "small":
        left &= held.nbytes <= SMALL_REPLICA_BYTES
    rows = final.rows_in(local)
    if rows is not None:
        left[rows] = False
    else:
        left[_whole_boxes(held, len(local))] = False
        written = {item.index for item in final.items}
        left[[row for row in np.flatnonzero(left).tolist() if held.item(row).index in written]] = False
    found: list[int] = np.flatnonzero(left).tolist()
    return found


def _whole_boxes(held: SavePlan, count: int) -> list[int]:
    """Which of the first `count` boxes the boxes after them are parts of."""
    rows: set[int] = set()
    for part in range(count, len(held)):
        inside = held.item(part).index
        for row in np.flatnonzero(held.chunks.entry[:count] == held.chunks.entry[part]).tolist():
            offsets, sizes = held.chunks.box(row)
            box = Box(offsets, sizes)
            if intersect(box, Box(inside.offsets, inside.sizes)) is not None:
                rows.add(row)
    return sorted(rows)


def check_left_out(metadata: Metadata, left_out: Sequence[SavePlan | None]) -> None:
    """Raise unless `metadata` has all that ranks left out of their local plans, counting on others to write it.

    Raises:
        StateDictError: names what would be lost.
    """
    lost: list[str] = []
    for rank, plan in enumerate(left_out):
        for item in () if plan is None else plan.items:
            row = metadata.find(item.index.fqn, item.index.owner)
            rows = () if row is None else metadata.chunk_rows(row)
            if missing(Box(item.index.offsets, item.index.sizes), [Box(*metadata.chunks.box(r)) for r in rows]):
                lost.append(f"{item.index.fqn!r} (rank {rank})")
    if lost:
        raise StateDictError(
            f"the state of some ranks has changed since the last save, and what they wrote then was staged by no other "
            f"rank: {listed(lost, most=_MOST_NAMED)}. Nothing was published; the next save stages all of it."
        )


def check_replicas(whole: WholePlan, storage: StorageTable, reports: Sequence[ReplicaReport]) -> None:
    """Compare what ranks hold with what was written in their stead.

    Args:
        whole: what all ranks wrote.
        storage: where, with the checksums of it.
        reports: every rank's report.

    Raises:
        ReplicaMismatchError: lists the keys that differ.
    """
    stored = np.concatenate([whole.held_by(rank)[report.rows] for rank, report in enumerate(reports)])
    ranks = np.repeat(np.arange(len(reports)), [len(report.rows) for report in reports])
    lengths = np.concatenate([report.nbytes for report in reports])
    crc_lengths = np.concatenate([report.crc_ends - starts_of(report.crc_ends) for report in reports])
    crcs = np.concatenate([report.crcs for report in reports])
    # What a custom planner has others write in other boxes cannot be compared.
    known = np.flatnonzero(stored >= 0)
    wrong = np.zeros(len(stored), dtype=np.bool_)
    wrong[known] = storage.length[stored[known]] != lengths[known]
    same = np.flatnonzero(~wrong & (stored >= 0) & (crc_lengths > 0))
    ends, mine = take_runs(ends_of(crc_lengths), same)
    _, theirs = take_runs(storage.crc_ends, stored[same])
    if len(mine) != len(theirs):
        raise ReplicaMismatchError("a rank reported another number of checksums than there are blocks.")
    if len(same):
        wrong[same] = np.logical_or.reduceat(crcs[mine] != storage.crcs[theirs], starts_of(ends))
    if not wrong.any():
        return
    named: dict[str, list[int]] = {}
    for row in np.flatnonzero(wrong).tolist():
        entry = int(whole.metadata.chunks.entry[int(stored[row])])
        named.setdefault(whole.metadata.entries.fqns[entry], []).append(int(ranks[row]))
    keys = [f"{fqn!r} (rank {', '.join(map(str, who[:4]))})" for fqn, who in named.items()]
    raise ReplicaMismatchError(
        f"{len(named)} keys are not the same on all ranks: {listed(keys, most=_MOST_NAMED, separator='; ')} differ "
        "from the rank that writes them. "
        "Mark state that differs on every rank with PerRank, synchronise what should be equal, or set "
        "check_replicas=off."
    )
