"""Ranks that hold the same thing: who of them writes it.

Runs on the coordinator over all ranks' plans, as columns. Everything here is a pure function of the plans, so that
it gives the same answer wherever it is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._base.timing import log_message
from hpdcp._format.columns import (
    I64,
    ChunkTable,
    concat_chunks,
    ends_of,
    group_starts,
    sort_order,
    starts_of,
)
from hpdcp._format.metadata import Metadata
from hpdcp._plan._coverage import check_exact_cover, overlapping_boxes
from hpdcp._plan._merged_names import MergedNames, merge_names
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.whole_plan import WholePlan, join_results
from hpdcp._plan.write_results import WriteResults
from hpdcp._state.mismatches import listed

SPLIT_BYTES: Final = 64 << 20
"""A replica is split among its holders only above this; no box of it is planned much smaller."""
_MANY_HOLDERS: Final = 16
"""From here on numpy finds the least loaded holder faster than Python does."""


def drop_duplicates(
    plans: Sequence[SavePlan],
    *,
    remove_redundancy: bool,
    to_minimum_rank: bool,
    whole: bool = True,
    may_differ: Callable[[Iterable[str]], npt.NDArray[np.bool_] | None] = lambda fqns: None,
) -> tuple[list[SavePlan], Metadata]:
    """Each rank's part, every box in exactly one of them, and the metadata of all.

    A box that one rank holds is that rank's. One that several hold goes, largest first, to the holder with the fewest
    bytes so far (`to_minimum_rank`: to the lowest). One that is larger than `SPLIT_BYTES` and than a rank's fair share
    of all bytes is split by rows first, into boxes that go the same way. Without `remove_redundancy` every holder
    writes its own copy. `whole`: the plans are those of all ranks, so that what they lack nobody has. `may_differ`:
    which names may hold other values on other ranks; of each box of these the lowest holder stores its own, in one box.

    Raises:
        StateDictError: ranks disagree on a key's kind, dtype or global shape, or together leave a hole in a tensor, or
            hold boxes of it that overlap and are not the same.
    """
    merged = merge_names(plans)
    items = _Items.of(merged)
    order, first = items.sorted()
    differ = may_differ(merged.entries.fqns)
    if differ is None:
        differ = np.zeros(len(merged.entries), dtype=np.bool_)
    if remove_redundancy:
        if not to_minimum_rank:
            counts = _split_counts(items, order, first, len(plans), differ)
            if counts is not None:
                items = items.split(counts)
                order, first = items.sorted()
        lowest = np.ones(len(order), dtype=np.bool_) if to_minimum_rank else differ[items.chunks.entry[order]]
        chosen = order[_writers(items.ranks[order], items.nbytes[order], first, len(plans), lowest)]
    else:
        chosen = order[first | ~differ[items.chunks.entry[order]]]
    if whole:
        check_exact_cover(merged.entries, items.chunks.take(order[first]))
    chunks = items.chunks.take(chosen)
    written = items.plans(merged.plans, chosen)
    return written, Metadata(merged.entries, chunks, settings={"world_size": str(len(plans))})


def merge_rank_metadata(parts: Sequence[Metadata]) -> Metadata:
    """What ranks recorded each for itself, as one; boxes that several of them stored are all there.

    Raises:
        StateDictError: ranks mean different things by one key.
    """
    merged = merge_names([SavePlan(part.entries, part.chunks, part.storage.length) for part in parts])
    items = _Items.of(merged)
    order, first = items.sorted()
    shared = overlapping_boxes(merged.entries, items.chunks.take(order[first]))
    if shared:
        # What is stored stays readable: the ranks may well have meant the same values.
        log_message(
            logging.WARNING,
            f"{len(shared)} tensors have elements that two ranks stored in different boxes, and only one rank's values "
            f"are loaded: {listed(shared, separator='; ')}. If they may differ, save again with the right offsets.",
        )
    metadata = Metadata(merged.entries, items.chunks.take(order), settings=parts[0].settings)
    results = [WriteResults(part.storage) for part in parts]
    for rank, rows in merged.sources.items():
        results[rank] = results[rank].take(rows)
    joined = join_results(WholePlan.of(metadata, merged.plans, merged.plans), results)
    return metadata.with_storage(joined.table, {})


def boxes_that_overlap(metadata: Metadata) -> list[str]:
    """Tensors on record of which distinct boxes overlap, each with two of them, as text."""
    return overlapping_boxes(metadata.entries, metadata.chunks)


@dataclass(frozen=True, slots=True)
class _Items:
    """The items of all ranks, rank by rank, of entries they share."""

    chunks: ChunkTable
    ranks: I64
    nbytes: I64
    row: I64
    """Of the plan of its rank; for a box that was split off, of the item it was part of."""
    is_split: npt.NDArray[np.bool_] | None = None

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

    def split(self, counts: I64) -> _Items:
        """With each item as so many boxes, by rows."""
        source = np.repeat(np.arange(len(counts)), counts)
        chunks, nbytes = self.chunks.take(source), self.nbytes[source]
        number = np.arange(len(source)) - np.repeat(starts_of(ends_of(counts)), counts)
        is_split = counts[source] > 1
        starts = starts_of(chunks.ends)
        for i in np.flatnonzero(is_split).tolist():
            sizes = chunks.sizes[int(starts[i]) : int(chunks.ends[i])]
            axis = int(np.argmax(sizes > 1))
            rows, count = int(sizes[axis]), int(counts[source[i]])
            begin, end = rows * int(number[i]) // count, rows * (int(number[i]) + 1) // count
            chunks.offsets[int(starts[i]) + axis] += begin
            nbytes[i] = int(nbytes[i]) // rows * (end - begin)
            sizes[axis] = end - begin
        return _Items(chunks, self.ranks[source], nbytes, self.row[source], is_split)

    def plans(self, plans: Sequence[SavePlan], chosen: npt.NDArray[np.intp]) -> list[SavePlan]:
        """Each rank's plan: its items among `chosen`."""
        keep = np.zeros(len(self.ranks), dtype=np.bool_)
        keep[chosen] = True
        bounds = np.searchsorted(self.ranks, np.arange(len(plans) + 1)).tolist()
        return [
            self._plan_of(plan, start, np.flatnonzero(keep[start:stop]) + start, stop)
            for plan, start, stop in zip(plans, bounds[:-1], bounds[1:], strict=True)
        ]

    def _plan_of(self, plan: SavePlan, start: int, kept: npt.NDArray[np.intp], stop: int) -> SavePlan:
        if self.is_split is None or not self.is_split[start:stop].any():
            return plan.select(self.row[kept])
        return SavePlan(
            plan.entries,
            self.chunks.take(kept).with_entry(plan.chunks.entry[self.row[kept]]),
            self.nbytes[kept],
            plan.storage_data,
        )


def _split_counts(
    items: _Items,
    order: npt.NDArray[np.intp],
    first: npt.NDArray[np.bool_],
    world_size: int,
    differ: npt.NDArray[np.bool_],
) -> I64 | None:
    """Into how many boxes each item is split, so that no box alone unbalances the plan; None where none is."""
    starts = np.flatnonzero(first)
    holders = np.diff(starts, append=len(first))
    nbytes = items.nbytes[order[starts]]
    most = max(SPLIT_BYTES, -(-int(nbytes.sum()) // world_size))
    counts: I64 | None = None
    fit = ~differ[items.chunks.entry[order[starts]]]
    for group in np.flatnonzero((holders > 1) & (nbytes > most) & fit).tolist():
        members = order[starts[group] : starts[group] + holders[group]]
        rows = next((size for size in items.chunks.box(int(members[0]))[1] if size > 1), 1)
        count = min(int(holders[group]), rows, -(-int(nbytes[group]) // most))
        if count > 1:
            counts = np.ones(len(order), dtype=np.int64) if counts is None else counts
            counts[members] = count
    return counts


def _writers(
    ranks: I64, nbytes: I64, first: npt.NDArray[np.bool_], world_size: int, lowest: npt.NDArray[np.bool_]
) -> npt.NDArray[np.intp]:
    """For each group of identical boxes (they start where `first`), the position of the holder that writes it."""
    starts = np.flatnonzero(first)
    sizes = np.diff(starts, append=len(first))
    writers = starts.copy()  # rows of a group are in order of rank
    settled = (sizes == 1) | lowest[starts]
    if settled.all():
        return writers
    load = np.bincount(ranks[starts[settled]], weights=nbytes[starts[settled]], minlength=world_size)
    shared = np.flatnonzero(~settled)
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
