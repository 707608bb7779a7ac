"""What all ranks want of a checkpoint, as columns, and which of it several of them want alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpdcp._format.columns import (
    I64,
    EntryKind,
    concat_chunks,
    ends_of,
    group_starts,
    sort_order,
    starts_of,
    take_runs,
)
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.shared_boxes import DIRECT, ON_DEVICE, Group
from hpdcp._state.dtypes import itemsize_of

Bools: TypeAlias = npt.NDArray[np.bool_]


class WantedChunks:
    """Every rank's destination chunks, one rank after another."""

    def __init__(self, plans: Sequence[LoadPlan], metadata: Metadata) -> None:
        names = list(metadata.entries.dtype_names)
        counts = np.array([len(plan.target_columns.kinds) for plan in plans], dtype=np.int64)
        self.ranks = np.repeat(np.arange(len(plans), dtype=np.int64), counts)
        self.rows = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts_of(ends_of(counts)), counts)
        """Of their plan's targets."""
        self.boxes = concat_chunks([plan.target_columns.boxes for plan in plans])
        self.entries = np.concatenate([_stored_entry(plan, metadata) for plan in plans])
        """Row of the stored tensor; -1 where nothing is read for the chunk."""
        known = self.entries >= 0
        self.dtypes = np.full(len(known), -1, dtype=np.int64)
        """Of the stored elements, as rows of the metadata's dtype names."""
        self.dtypes[known] = metadata.entries.dtype_codes[self.entries[known]]
        sizes = np.array([itemsize_of(name) for name in names], dtype=np.int64)
        self.widths = np.ones(len(known), dtype=np.int64)
        """Bytes of a stored element."""
        self.widths[known] = sizes[self.dtypes[known]]
        self.nbytes = self.boxes.volumes() * self.widths
        owners = np.concatenate([plan.target_columns.owners for plan in plans])
        kinds = np.concatenate([plan.target_columns.kinds for plan in plans])
        described = np.concatenate([plan.target_columns.dtypes for plan in plans]) >= 0
        self.sharable = known & described & (owners < 0) & (kinds == EntryKind.TENSOR)
        flags = np.concatenate([plan.target_columns.direct for plan in plans])
        self.on_device = (flags & ON_DEVICE).astype(np.bool_)
        self.direct = (flags & DIRECT).astype(np.bool_)
        """Whether stored bytes can be received straight into the target."""
        self.direct &= np.concatenate([_target_dtype(plan, names) for plan in plans]) == self.dtypes

    def alike(self) -> AlikeChunks:
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
        ends, positions = take_runs(ends_of(lengths), np.flatnonzero(lengths > 1))
        members = rows[order][positions]
        groups, group = _distinct_groups(self.ranks[members], ends)
        return AlikeChunks(members, ends, groups, group)


@dataclass(frozen=True, slots=True)
class AlikeChunks:
    """Sets of identical chunks, in the total order."""

    members: I64
    """Rows of `WantedChunks`, set by set, ranks ascending."""
    ends: I64
    groups: list[Group]
    """The ranks of sets, each once, sorted."""
    group: I64
    """For each set, its row in `groups`."""

    @property
    def heads(self) -> I64:
        """The first row of each set."""
        return self.members[starts_of(self.ends)]

    def saved_bytes(self, wanted: WantedChunks) -> list[float]:
        """For each group, how many bytes fewer are read if one of its ranks reads for all."""
        shared = np.bincount(self.group, weights=wanted.nbytes[self.heads], minlength=len(self.groups))
        return [nbytes * (len(group) - 1) for nbytes, group in zip(shared.tolist(), self.groups, strict=True)]

    def of_groups(self, rows: Sequence[int]) -> AlikeChunks:
        """The sets of these groups only."""
        position = np.full(len(self.groups), -1, dtype=np.int64)
        position[list(rows)] = np.arange(len(rows))
        sets = np.flatnonzero(position[self.group] >= 0)
        ends, positions = take_runs(self.ends, sets)
        groups = [self.groups[row] for row in rows]
        return AlikeChunks(self.members[positions], ends, groups, position[self.group[sets]])


def _distinct_groups(ranks: I64, ends: I64) -> tuple[list[Group], I64]:
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
    position_of = np.empty(len(seen), dtype=np.int64)
    position_of[in_order] = np.arange(len(seen))
    return [seen[row] for row in in_order], position_of[group]


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
