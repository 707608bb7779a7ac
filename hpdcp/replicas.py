"""Ranks that hold the same thing: who writes it, and whether they really agree.

Runs on the coordinator over all ranks' plans, as columns. Everything here is a pure function of the plans, so that
it gives the same answer wherever it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpdcp.config import ReplicaCheck
from hpdcp.container import StringColumn, pack_columns, unpack_columns
from hpdcp.errors import ReplicaMismatchError, StateDictError
from hpdcp.geometry import Box, missing
from hpdcp.metadata import Metadata
from hpdcp.planner import SavePlan
from hpdcp.storage import WriteResults, entry_rows, join_results
from hpdcp.tables import (
    I64,
    ChunkTable,
    Entry,
    EntryKind,
    EntryTable,
    column,
    concat_chunks,
    ends_of,
    group_starts,
    sort_order,
    starts_of,
    take_runs,
    take_strings,
)

SMALL_REPLICA_BYTES = 1 << 20
"""Up to here a replica is compared when `check_replicas` is "small"."""
_MOST_NAMED = 20


def drop_duplicates(
    plans: Sequence[SavePlan], *, remove_redundancy: bool, to_minimum_rank: bool, whole: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Each rank's part, every box in exactly one of them, and the metadata of all.

    A box that one rank holds is that rank's. One that several hold goes, largest first, to the holder with the fewest
    bytes so far (`to_minimum_rank`: to the lowest). Without `remove_redundancy` every holder writes its own copy.
    `whole`: the plans are those of all ranks, so that what they lack nobody has.

    Raises:
        StateDictError: ranks disagree on a key's kind, dtype or global shape, or together leave a hole in a tensor.
    """
    contested = _contested_aliases(plans)
    plans = [_without_contested_aliases(plan, contested)[0] for plan in plans]
    entries, rows = _merge_entries(plans)
    items = concat_chunks(
        [plan.chunks.with_entry(row[plan.chunks.entry]) for plan, row in zip(plans, rows, strict=True)]
    )
    counts = np.array([len(plan) for plan in plans], dtype=np.int64)
    ranks = np.repeat(np.arange(len(plans), dtype=np.int64), counts)
    nbytes = np.concatenate([plan.nbytes for plan in plans]) if plans else np.zeros(0, dtype=np.int64)

    keys = items.sort_keys()
    order = sort_order(keys)
    first = group_starts(keys, order)
    if remove_redundancy:
        chosen = order[_writers(ranks[order], nbytes[order], first, len(plans), to_minimum_rank)]
    else:
        chosen = order
    chunks = items.take(chosen)
    if whole:
        _check_holes(entries, items.take(order[first]))
    keep = np.zeros(len(ranks), dtype=np.bool_)
    keep[chosen] = True
    parts = np.split(keep, ends_of(counts)[:-1])
    written = [plan.select(np.flatnonzero(part)) for plan, part in zip(plans, parts, strict=True)]
    return written, Metadata(entries, chunks, settings={"world_size": str(len(plans))})


def merge_rank_metadata(parts: Sequence[Metadata]) -> Metadata:
    """What ranks recorded each for itself, as one; boxes that several of them stored are all there.

    Raises:
        StateDictError: ranks mean different things by one key.
    """
    stored = [SavePlan(part.entries, part.chunks, part.storage.length) for part in parts]
    contested = _contested_aliases(stored)
    plans, sources = zip(*(_without_contested_aliases(plan, contested) for plan in stored), strict=True)
    entries, rows = _merge_entries(plans)
    items = concat_chunks(
        [plan.chunks.with_entry(row[plan.chunks.entry]) for plan, row in zip(plans, rows, strict=True)]
    )
    metadata = Metadata(entries, items.take(sort_order(items.sort_keys())), settings=parts[0].settings)
    results = [WriteResults(part.storage).take(rows) for part, rows in zip(parts, sources, strict=True)]
    return metadata.with_storage(join_results(metadata, plans, results), {})


def _writers(
    ranks: I64, nbytes: I64, first: npt.NDArray[np.bool_], world_size: int, to_minimum_rank: bool
) -> npt.NDArray[np.intp]:
    """For each group of identical boxes (they start where `first`), the position of the holder that writes it."""
    starts = np.flatnonzero(first)
    sizes = np.diff(starts, append=len(first))
    writers = starts.copy()
    if to_minimum_rank:
        return writers  # rows of a group are in order of rank
    load = np.bincount(ranks[starts[sizes == 1]], weights=nbytes[starts[sizes == 1]], minlength=world_size).tolist()
    shared = np.flatnonzero(sizes > 1)
    largest_first = shared[np.argsort(-nbytes[starts[shared]], kind="stable")]
    holders = ranks.tolist()
    for group, start, size, weight in zip(
        largest_first.tolist(),
        starts[largest_first].tolist(),
        sizes[largest_first].tolist(),
        nbytes[starts[largest_first]].tolist(),
        strict=True,
    ):
        best = min(range(start, start + size), key=lambda row: load[holders[row]])
        load[holders[best]] += weight
        writers[group] = best
    return writers


def _merge_entries(plans: Sequence[SavePlan]) -> tuple[EntryTable, list[I64]]:
    """All ranks' names once, sorted, and for each plan where its entries went."""
    ids: dict[tuple[bytes, int], int] = {}
    witness: list[tuple[int, int]] = []
    sure: list[bool] = []
    found: list[I64] = []
    for rank, plan in enumerate(plans):
        mine = np.empty(len(plan.entries), dtype=np.int64)
        holds = _holds_something(plan).tolist()
        for row, name in enumerate(_names(plan.entries)):
            known = ids.setdefault(name, len(witness))
            if known == len(witness):
                witness.append((rank, row))
                sure.append(holds[row])
            elif holds[row] and not sure[known]:
                witness[known], sure[known] = (rank, row), True
            mine[row] = known
        found.append(mine)
    _check_agreement(plans, found, witness)
    names = sorted(ids)
    position = np.empty(len(names), dtype=np.int64)
    for place, name in enumerate(names):
        position[ids[name]] = place
    merged = concat_entries([plan.entries for plan in plans])
    first_row = starts_of(ends_of(np.array([len(plan.entries) for plan in plans], dtype=np.int64)))
    sources = np.array([first_row[rank] + row for rank, row in (witness[ids[name]] for name in names)], dtype=np.int64)
    return take_entries(merged, sources), [position[mine] for mine in found]


def _names(entries: EntryTable) -> Iterator[tuple[bytes, int]]:
    blob, start = entries.fqns.blob.tobytes(), 0
    for end, owner in zip(entries.fqns.ends.tolist(), entries.owners.tolist(), strict=True):
        yield blob[start:end], owner
        start = end


def concat_entries(tables: Sequence[EntryTable]) -> EntryTable:
    """The rows of all tables, one after another."""
    names = sorted({name for table in tables for name in table.dtype_names})
    code = {name: i for i, name in enumerate(names)}
    codes = [
        np.array([code[name] for name in table.dtype_names], dtype=np.int32)[table.dtype_codes] for table in tables
    ]

    def strings(columns: Sequence[StringColumn]) -> StringColumn:
        shift = starts_of(ends_of(np.array([len(text.blob) for text in columns], dtype=np.int64)))
        ends = [text.ends + start for text, start in zip(columns, shift, strict=True)]
        return StringColumn(np.concatenate([text.blob for text in columns]), np.concatenate(ends))

    shapes = np.concatenate([table.ndims() for table in tables])
    return EntryTable(
        fqns=strings([table.fqns for table in tables]),
        paths=strings([table.paths for table in tables]),
        kinds=np.concatenate([table.kinds for table in tables]),
        dtype_codes=np.concatenate(codes),
        dtype_names=StringColumn.from_strings(names),
        owners=np.concatenate([table.owners for table in tables]),
        targets=strings([table.targets for table in tables]),
        shape_ends=ends_of(shapes),
        shape_dims=np.concatenate([table.shape_dims for table in tables]),
    )


def take_entries(table: EntryTable, order: I64) -> EntryTable:
    """The rows of `table` in `order`."""
    shape_ends, positions = take_runs(table.shape_ends, order)
    return EntryTable(
        fqns=take_strings(table.fqns, order),
        paths=take_strings(table.paths, order),
        kinds=table.kinds[order],
        dtype_codes=table.dtype_codes[order],
        dtype_names=table.dtype_names,
        owners=table.owners[order],
        targets=take_strings(table.targets, order),
        shape_ends=shape_ends,
        shape_dims=table.shape_dims[positions],
    )


def _check_agreement(plans: Sequence[SavePlan], found: Sequence[I64], witness: Sequence[tuple[int, int]]) -> None:
    """Every rank that holds a key must mean the same tensor by it, or the same kind of thing."""
    facts: dict[int, _Fact] = {}
    complaints: list[str] = []
    for rank, (plan, mine) in enumerate(zip(plans, found, strict=True)):
        holds = _holds_something(plan).tolist()
        for row, (known, fact) in enumerate(zip(mine.tolist(), _facts(plan.entries), strict=True)):
            other, other_row = witness[known]
            if known not in facts:
                facts[known] = fact if (other, other_row) == (rank, row) else _fact(plans[other].entries, other_row)
            expected = facts[known]
            # A rank without any of a tensor's elements may not know its dtype (a wrapper of no shards says float32).
            if fact != expected and (holds[row] or fact[::2] != expected[::2]):
                name, theirs, mine_ = plan.entries.fqns[row], _describe(expected), _describe(fact)
                complaints.append(f"{name!r} is {theirs} on rank {other} and {mine_} on rank {rank}")
    if complaints:
        raise StateDictError(
            f"ranks disagree on {len(complaints)} keys: {_list(complaints)}. Give different things "
            "different keys, or mark state that differs on every rank with PerRank."
        )


_Fact: TypeAlias = tuple[bool, str, tuple[int, ...]]
"""(whether it is a tensor, dtype, global shape): what all ranks must mean by one key."""


def _facts(table: EntryTable) -> Iterator[_Fact]:
    dtypes = list(table.dtype_names)
    dims, start = table.shape_dims.tolist(), 0
    for kind, code, end in zip(
        table.kinds.tolist(), table.dtype_codes.tolist(), table.shape_ends.tolist(), strict=True
    ):
        yield kind != EntryKind.OBJECT, dtypes[code], tuple(dims[start:end])
        start = end


def _fact(table: EntryTable, row: int) -> _Fact:
    return int(table.kinds[row]) != EntryKind.OBJECT, table.dtype(row), table.shape(row)


def _holds_something(plan: SavePlan) -> npt.NDArray[np.bool_]:
    """For each entry, whether the rank has items of it, or a name that is tied to another's."""
    holds = np.zeros(len(plan.entries), dtype=np.bool_)
    holds[plan.chunks.entry] = True
    holds |= plan.entries.kinds == EntryKind.ALIAS
    return holds


def _describe(fact: _Fact) -> str:
    is_tensor, dtype, shape = fact
    return f"a {dtype} tensor of global shape {list(shape)}" if is_tensor else "a Python value"


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
            f"no rank holds all of {len(holes)} tensors: {_list(holes)}. "
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


def _contested_aliases(plans: Sequence[SavePlan]) -> frozenset[str]:
    """Names tied on some ranks, but not on all that hold them, or not to the same name: these store their own bytes."""
    target: dict[str, str] = {}
    contested: set[str] = set()
    if not any(bool((plan.entries.kinds == EntryKind.ALIAS).any()) for plan in plans):
        return frozenset()
    for plan in plans:
        table = plan.entries
        for fqn, kind, tied, owner in zip(
            table.fqns, table.kinds.tolist(), table.targets, table.owners.tolist(), strict=True
        ):
            if owner < 0 and kind != EntryKind.OBJECT and target.setdefault(fqn, tied) != tied:
                contested.add(fqn)
    # A target that itself became an alias elsewhere would be a chain of names; storing it costs little and ends it.
    contested.update(fqn for fqn, tied in target.items() if tied and target.get(tied))
    return frozenset(contested)


def _without_contested_aliases(plan: SavePlan, contested: frozenset[str]) -> tuple[SavePlan, I64]:
    """The plan with its contested aliases as tensors of their own, and for each item the item whose bytes it has."""
    table = plan.entries
    rows = np.arange(len(plan), dtype=np.int64)
    row_of = {fqn: row for row, fqn in enumerate(table.fqns) if table.owners[row] < 0} if contested else {}
    changed = [row for fqn, row in row_of.items() if fqn in contested and table.kinds[row] == EntryKind.ALIAS]
    if not changed:
        return plan, rows
    entries: list[Entry] = [table[row] for row in range(len(table))]
    extra: list[I64] = []
    new_rows: list[int] = []
    for row in changed:
        items = np.flatnonzero(plan.chunks.entry == row_of[entries[row].target])
        entries[row] = replace(entries[row], kind=EntryKind.TENSOR, target="")
        extra.append(items)
        new_rows += [row] * len(items)
    sources = np.concatenate([rows, *extra])
    copied = plan.chunks.take(sources[len(rows) :]).with_entry(np.array(new_rows, dtype=np.int64))
    chunks = concat_chunks([plan.chunks, copied])
    return SavePlan(EntryTable.from_entries(entries), chunks, plan.nbytes[sources], plan.storage_data), sources


class ReplicaReport:
    """What one rank holds and did not write: rows of its local plan, and the checksums of each."""

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


def rows_not_written(local: SavePlan, final: SavePlan, check: ReplicaCheck) -> list[int]:
    """Rows of `local` that another rank writes and that `check` asks to compare.

    `final` may hold the items in another order, or parts of one: what it has no identical item for was left to others.
    """
    if check == "off" or len(local) == 0:
        return []
    rows = np.arange(len(local)) if check == "all" else np.flatnonzero(local.nbytes <= SMALL_REPLICA_BYTES)
    written = {item.index for item in final.items}
    owners = local.entries.owners[local.chunks.entry[rows]]
    return [row for row in rows[owners < 0].tolist() if local.item(row).index not in written]


def check_replicas(metadata: Metadata, plans: Sequence[SavePlan], reports: Sequence[ReplicaReport]) -> None:
    """Compare what ranks hold with what was written in their stead.

    Args:
        metadata: with storage, so with the checksums of what was written.
        plans: every rank's local plan, whole.
        reports: every rank's report on its local plan.

    Raises:
        ReplicaMismatchError: lists the keys that differ.
    """
    held = []
    for plan, report, row in zip(plans, reports, entry_rows(metadata, plans), strict=True):
        part = plan.chunks.take(report.rows)
        held.append(part.with_entry(row[part.entry]))
    queries = concat_chunks(held)
    if not len(queries):
        return
    ranks = np.repeat(np.arange(len(reports)), [len(report.rows) for report in reports])
    stored = _match(metadata.chunks, queries)
    lengths = np.concatenate([report.nbytes for report in reports])
    crc_lengths = np.concatenate([report.crc_ends - starts_of(report.crc_ends) for report in reports])
    crc_ends = ends_of(crc_lengths)
    crcs = np.concatenate([report.crcs for report in reports])
    wrong: dict[str, list[int]] = {}
    for query in np.flatnonzero(stored >= 0).tolist():
        info = metadata.storage_info(int(stored[query]))
        mine = tuple(crcs[int(crc_ends[query]) - int(crc_lengths[query]) : int(crc_ends[query])].tolist())
        if info.length != int(lengths[query]) or info.checksums != mine:
            name = metadata.entries.fqns[int(metadata.chunks.entry[int(stored[query])])]
            wrong.setdefault(name, []).append(int(ranks[query]))
    if wrong:
        named = [f"{fqn!r} (rank {', '.join(map(str, ranks[:4]))})" for fqn, ranks in wrong.items()]
        raise ReplicaMismatchError(
            f"{len(wrong)} keys are not the same on all ranks: {_list(named)} differ from the rank that writes them. "
            "Mark state that differs on every rank with PerRank, synchronise what should be equal, or set "
            "check_replicas=off."
        )


def _match(chunks: ChunkTable, queries: ChunkTable) -> I64:
    """For each query the first row of `chunks` that is the same box; -1 where there is none."""
    both = concat_chunks([chunks, queries])
    keys = both.sort_keys()
    order = sort_order(keys)
    group = np.cumsum(group_starts(keys, order)) - 1
    heads = order[np.flatnonzero(group_starts(keys, order))]
    answer = np.full(len(both), -1, dtype=np.int64)
    answer[order] = np.where(heads[group] < len(chunks), heads[group], -1)
    return answer[len(chunks) :]


def _list(parts: Sequence[str]) -> str:
    more = f"; and {len(parts) - _MOST_NAMED} more" if len(parts) > _MOST_NAMED else ""
    return "; ".join(parts[:_MOST_NAMED]) + more
