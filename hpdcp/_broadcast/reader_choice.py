"""Who reads what several ranks want: the load side of replicas.

Runs on the coordinator over all ranks' plans, as columns; a pure function of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._broadcast._stripes import Stripes, balanced_count
from hpdcp._broadcast._units import transport_dtype
from hpdcp._broadcast._wanted_chunks import AlikeChunks, Bools, WantedChunks
from hpdcp._format.columns import I64, ends_of, group_starts, sort_order, starts_of, take_runs
from hpdcp._format.metadata import Metadata
from hpdcp._format.strings import StringColumn
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.shared_boxes import DIRECT, ON_DEVICE, Group, SharedColumns

MOST_NEW_GROUPS: Final = 64
"""Process groups that one load creates: each costs every rank a handshake, member or not."""
_LEAST_RUN_BYTES: Final = 1 << 20
"""Small boxes are not spread over more ranks than leave each of them this much to read in one go."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What the choice depends on beside plans and metadata."""

    batch_bytes: int
    """Boxes below this size are small."""
    shares: Callable[[Group], bool]
    """Whether this group of ranks shares at all, rather than each of them reading for itself."""
    exists: Callable[[Group], bool]
    """Whether it has a process group already; of the others, the `MOST_NEW_GROUPS` that save the most bytes share."""
    carries_devices: Callable[[Group], bool]
    """Whether a process group of these ranks' devices is there or can be made. Boxes that all members want on their
    devices go through it, if they are small or go straight into every target: through memory of the device's they
    would take as much of it as they are large."""


def choose_readers(
    plans: Sequence[LoadPlan], metadata: Metadata, rules: GroupRules
) -> tuple[list[LoadPlan], list[Group]]:
    """The same plans, with a reader rank for each destination chunk that several ranks want alike; and all groups.

    Chunks are alike when they are the same box of the same stored tensor, under whatever name. Ranks are balanced by
    bytes, largest boxes first, to the rank of the group with the least to read so far; what a rank reads for itself
    counts first. Small boxes that follow one another go to one rank together: they lie side by side in the files,
    and a store that fetches the gaps between them as well would otherwise fetch everything once for every rank.

    Boxes come in one total order (wider elements first, then stored name, offsets, sizes: the order of the files),
    which every rank walks: two ranks that meet in several groups never wait for each other in opposite orders.
    """
    wanted = WantedChunks(plans, metadata)
    alike = _shared_groups(wanted.alike(), wanted, rules)
    heads = alike.heads
    stripes = Stripes.of_chunks(wanted.boxes.take(heads), wanted.widths[heads], np.diff(alike.ends, prepend=0))
    readers = _reader_ranks(wanted, alike, stripes, rules.batch_bytes)
    carried = np.array([rules.carries_devices(group) for group in alike.groups], dtype=np.bool_)
    # Only what may go through a device's memory, by group and size.
    to_devices = _DeviceRows(carried[alike.group[stripes.chunk]], stripes.nbytes < rules.batch_bytes)
    return _plans_with(plans, wanted, alike, stripes, readers, to_devices, metadata), alike.groups


def _shared_groups(alike: AlikeChunks, wanted: WantedChunks, rules: GroupRules) -> AlikeChunks:
    """What is shared in the end: of groups that would have to be made, only the most useful ones are."""
    saved = alike.saved_bytes(wanted)
    agreed = [row for row, group in enumerate(alike.groups) if rules.shares(group)]
    new = sorted((row for row in agreed if not rules.exists(alike.groups[row])), key=lambda row: (-saved[row], row))
    refused = set(new[MOST_NEW_GROUPS:])
    return alike.of_groups([row for row in agreed if row not in refused])


def _reader_ranks(wanted: WantedChunks, alike: AlikeChunks, stripes: Stripes, batch_bytes: int) -> I64:
    """The rank that reads each stripe."""
    alone = np.ones(len(wanted.ranks), dtype=np.bool_)
    alone[alike.members] = False
    ranks = max([int(wanted.ranks.max()) if len(wanted.ranks) else 0, *(group[-1] for group in alike.groups)]) + 1
    load = np.bincount(wanted.ranks[alone], weights=wanted.nbytes[alone], minlength=ranks).astype(np.int64).tolist()
    group = alike.group[stripes.chunk]
    dtype = wanted.dtypes[alike.heads][stripes.chunk]
    run, count = _reading_runs(group, dtype, stripes.nbytes, alike.groups, batch_bytes)
    nbytes = np.bincount(run, weights=stripes.nbytes, minlength=count).astype(np.int64)
    group_of = np.empty(count, dtype=np.int64)
    group_of[run] = group
    chosen = np.zeros(count, dtype=np.int64)
    for number in np.argsort(-nbytes, kind="stable").tolist():
        reader = min(alike.groups[group_of[number]], key=load.__getitem__)
        load[reader] += int(nbytes[number])
        chosen[number] = reader
    return chosen[run]


def _reading_runs(group: I64, dtype: I64, nbytes: I64, groups: Sequence[Group], batch_bytes: int) -> tuple[I64, int]:
    """For each stripe the run that one rank reads, numbered in the order of the stripes; and how many there are.

    A stripe that is not small is its own. Small ones of one group and dtype are cut, in order, into runs of about
    equal size.
    """
    label = np.arange(len(nbytes), dtype=np.int64)
    small = np.flatnonzero(nbytes < batch_bytes)
    order = small[sort_order([group[small], dtype[small]])]
    first = group_starts([group[order], dtype[order]], np.arange(len(order)))
    starts = np.flatnonzero(first)
    for start, length in zip(starts.tolist(), np.diff(starts, append=len(order)).tolist(), strict=True):
        rows = order[start : start + length]
        before = np.cumsum(nbytes[rows]) - nbytes[rows]
        total = int(nbytes[rows].sum())
        count = balanced_count(total, batch_bytes, _LEAST_RUN_BYTES, len(groups[int(group[rows[0]])]))
        within = before * count // max(total, 1)
        label[rows] = rows[np.searchsorted(within, within)]
    return np.unique(label, return_inverse=True)[1].astype(np.int64), len(np.unique(label))


@dataclass(frozen=True, slots=True)
class _DeviceRows:
    """Which stripes may be sent from device to device."""

    carried: Bools
    """Whether the group has a process group of devices, or can have one."""
    small: Bools

    def flags(self, direct: Bools, on_device: Bools) -> npt.NDArray[np.uint8]:
        """The flags of each stripe, given which go straight into all targets, and whose targets are all on devices."""
        sent_on_device = on_device & self.carried & (direct | self.small)
        return (np.where(direct, DIRECT, 0) | np.where(sent_on_device, ON_DEVICE, 0)).astype(np.uint8)


def _plans_with(
    plans: Sequence[LoadPlan],
    wanted: WantedChunks,
    alike: AlikeChunks,
    stripes: Stripes,
    readers: I64,
    to_devices: _DeviceRows,
    metadata: Metadata,
) -> list[LoadPlan]:
    """Each rank's own stripes, in the total order."""
    stored = [name for name in metadata.entries.dtype_names if name]
    names = sorted({*stored, *map(transport_dtype, stored)})
    code = {name: row for row, name in enumerate(names)}
    stored_code = np.array([code.get(name, -1) for name in metadata.entries.dtype_names], dtype=np.int32)
    wire_code = np.array([code[transport_dtype(n)] if n else -1 for n in metadata.entries.dtype_names], dtype=np.int32)

    ends, positions = take_runs(alike.ends, stripes.chunk)
    rows = alike.members[positions]
    lengths = ends - starts_of(ends)
    stripe = np.repeat(np.arange(len(stripes.chunk)), lengths)
    none = np.zeros(0, np.bool_)
    direct = np.logical_and.reduceat(wanted.direct[rows], starts_of(ends)) if len(rows) else none
    on_device = np.logical_and.reduceat(wanted.on_device[rows], starts_of(ends)) if len(rows) else none
    flags = to_devices.flags(direct, on_device)
    by_rank = np.argsort(wanted.ranks[rows], kind="stable")
    bounds = np.searchsorted(wanted.ranks[rows][by_rank], np.arange(len(plans) + 1)).tolist()
    stripe = stripe[by_rank]
    boxes = stripes.boxes.take(stripe).with_entry(wanted.rows[rows[by_rank]])
    dtype = wanted.dtypes[alike.heads][stripes.chunk][stripe]
    group = alike.group[stripes.chunk][stripe]
    members = [np.array(ranks, dtype=np.int64) for ranks in alike.groups]
    dtype_names = StringColumn.from_strings(names)
    found = []
    for plan, (start, stop) in zip(plans, itertools.pairwise(bounds), strict=True):
        mine = slice(start, stop)
        # Only the rank's own groups: all of them to every rank would be ranks squared.
        own_groups, own_group = np.unique(group[mine], return_inverse=True)
        own_members = [members[row] for row in own_groups.tolist()]
        shared = SharedColumns(
            boxes.rows(start, stop),
            own_group.astype(np.int64),
            readers[stripe[mine]],
            stored_code[dtype[mine]],
            wire_code[dtype[mine]],
            flags[stripe[mine]],
            dtype_names,
            ends_of(np.array([len(ranks) for ranks in own_members], dtype=np.int64)),
            np.concatenate([np.zeros(0, dtype=np.int64), *own_members]),
        )
        found.append(plan.with_shared(shared))
    return found
