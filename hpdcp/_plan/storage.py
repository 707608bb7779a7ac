"""The contracts of a storage writer and a storage reader, and what a write reports back."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._base import config
from hpdcp._base.backend import Backend
from hpdcp._base.errors import NotSupportedError, StateDictError, StorageError
from hpdcp._format.columns import (
    I64,
    ChunkTable,
    EntryKind,
    EntryTable,
    column,
    concat_chunks,
    ends_of,
    group_starts,
    group_tables,
    sort_order,
    starts_of,
    take_runs,
)
from hpdcp._format.container import StringColumn, pack_columns, unpack_columns
from hpdcp._format.metadata import Metadata, StorageInfo, StorageTable
from hpdcp._plan.planner import LoadPlan, LoadPlanner, PlannerContext, SavePlan, SavePlanner


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One data file that a rank wrote."""

    key: str
    size: int
    """In bytes."""
    mark: int
    """crc32c of its first `metadata.HEAD_BYTES` bytes."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Where one item of the plan was stored."""

    storage: StorageInfo


class WriteResults:
    """What one rank's `execute_write` reports: a result for each item of its plan, in the plan's order."""

    def __init__(self, table: StorageTable, originals: StorageTable | None = None) -> None:
        self.table = table
        self.originals = originals
        """`table` with the lengths and checksums of the items themselves, where the layout stored some of them in
        another form (compressed, padded); None where it stored all of them as they are."""

    @classmethod
    def build(
        cls,
        results: Sequence[WriteResult],
        files: Sequence[FileRecord],
        originals: Sequence[WriteResult] | None = None,
    ) -> WriteResults:
        """From one result for each item of the plan, in order, and every file they name.

        `originals`: where the stored form is another, the same with the lengths and checksums of the items themselves.
        """
        if originals is not None:
            return cls(cls.build(results, files).table, cls.build(originals, files).table)
        position = {record.key: i for i, record in enumerate(files)}
        infos = [result.storage for result in results]
        unknown = sorted({info.key for info in infos} - position.keys())
        if unknown:
            raise StorageError(f"results name files that were not reported: {unknown[:5]}.")
        return cls(
            StorageTable(
                file=np.array([position[info.key] for info in infos], dtype=np.int32),
                offset=np.array([info.offset for info in infos], dtype=np.int64),
                length=np.array([info.length for info in infos], dtype=np.int64),
                crc_ends=ends_of(np.array([len(info.checksums) for info in infos], dtype=np.int64)),
                crcs=np.array([crc for info in infos for crc in info.checksums], dtype=np.uint32),
                file_names=StringColumn.from_strings([record.key for record in files]),
                file_sizes=np.array([record.size for record in files], dtype=np.int64),
                file_marks=np.array([record.mark for record in files], dtype=np.uint32),
            )
        )

    def __len__(self) -> int:
        return len(self.table.file)

    def take(self, rows: I64) -> WriteResults:
        """The results in the order of `rows`, one of which may come twice."""
        originals = None if self.originals is None else _take(self.originals, rows)
        return WriteResults(_take(self.table, rows), originals)

    def as_items(self) -> WriteResults:
        """With the lengths and checksums of the items themselves, whatever form they are stored in."""
        return WriteResults(self.table if self.originals is None else self.originals)

    @classmethod
    def reunited(cls, parts: Sequence[tuple[I64, WriteResults]]) -> WriteResults:
        """The results of a plan that was written in parts, each given with the rows of the plan it holds."""
        if not parts:
            return cls(StorageTable.empty())
        whole = _joined([results for _, results in parts])
        return whole.take(np.argsort(np.concatenate([rows for rows, _ in parts]), kind="stable"))

    def to_bytes(self) -> bytes:
        """For the exchange between ranks: columns, no pickle."""
        columns = dict(self.table.to_columns())
        if self.originals is not None:
            others = (self.originals.length, self.originals.crc_ends, self.originals.crcs)
            columns |= dict(zip(_ORIGINALS, others, strict=True))
        return pack_columns(columns, {})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> WriteResults:
        columns, _ = unpack_columns(data, where="a rank's write results")
        table = StorageTable.from_columns(columns)
        if _ORIGINALS[0] not in columns:
            return cls(table)
        length, ends = (column(columns, name, np.int64) for name in _ORIGINALS[:2])
        crcs = column(columns, _ORIGINALS[2], np.uint32)
        return cls(table, replace(table, length=length, crc_ends=ends, crcs=crcs))


_ORIGINALS: Final = ("original.length", "original.crc.ends", "original.crcs")


def _take(table: StorageTable, rows: I64) -> StorageTable:
    crc_ends, positions = take_runs(table.crc_ends, rows)
    return replace(
        table,
        file=table.file[rows],
        offset=table.offset[rows],
        length=table.length[rows],
        crc_ends=crc_ends,
        crcs=table.crcs[positions],
    )


def _joined(parts: Sequence[WriteResults]) -> WriteResults:
    """All rows and all files, one after another."""
    table = _side_by_side([results.table for results in parts])
    if all(results.originals is None for results in parts):
        return WriteResults(table)
    return WriteResults(table, _side_by_side([results.as_items().table for results in parts]))


class StorageWriter(ABC):
    """Executes save plans on some storage. One save calls, in this order:

    1. `initialize_writer`     every rank, only when `save` was given a `checkpoint_id` as well
    2. `configure_writer`      every rank
    3. `optimize_local_plan`   every rank; nothing may be changed on storage yet
    4. `arrange_global_plan`   the coordinator, over all ranks' final plans (without collectives: every rank, its own);
                               skipped where an earlier plan is used again
    5. `optimize_global_plan`  the coordinator, likewise
    6. `hand_over`             every rank, only where `hands_over`; ends on all ranks before 7 begins on any
    7. `execute_write`         every rank, once or more; its data is durable when it returns
    8. `finalize_checkpoint`   the coordinator, once every rank has written everything: the commit
    9. `discard`               instead of 8 every rank, when some rank failed: remove what this rank wrote

    An exception in any step on any rank makes every rank raise, and nothing is published.
    """

    def initialize_writer(self, checkpoint_id: str | Path) -> None:
        """Take the place to save to."""
        raise NotSupportedError(
            f"{type(self).__name__} takes no checkpoint_id; leave it out, or implement initialize_writer."
        )

    @property
    def place(self) -> str | None:
        """Where it saves to, as messages name it; None when that is not a place that a backend can open."""
        return None

    def open_place(self) -> Backend:
        """A backend at `place`, for what ranks tell one another through storage."""
        raise NotSupportedError(f"{type(self).__name__} saves to no place that a backend can open.")

    @abstractmethod
    def configure_writer(self, context: PlannerContext) -> None:
        """Start a new save."""

    def optimize_local_plan(self, plan: SavePlan) -> SavePlan:
        """A plan of the same items, better suited to this storage."""
        return plan

    @property
    def hands_over(self) -> bool:
        """Once configured: whether `hand_over` is to be called. Equal on all ranks."""
        return False

    def arrange_global_plan(
        self, plans: Sequence[SavePlan], metadata: Metadata, locals_: Sequence[SavePlan]
    ) -> tuple[Sequence[SavePlan], Metadata]:
        """The same state in the boxes that this storage can hold, and the metadata of these.

        `locals_` are the local plans that the plans were made of.
        """
        return plans, metadata

    def hand_over(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Store, where other ranks find it, what the plan's `hand_over` gives them."""
        return

    def optimize_global_plan(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """The same plans, carrying in `storage_data` what the coordinator decided for all."""
        return list(plans)

    @abstractmethod
    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        """Store every item of the plan, durably; one result for each, in the plan's order."""

    @abstractmethod
    def finalize_checkpoint(self, metadata: Metadata, results: Sequence[WriteResults]) -> Metadata:
        """Publish `metadata`, which holds all of `results` already, in one atomic step; returns what was published.

        An error means that nothing was published, and `discard` follows; one that leaves it open is a
        CommitUncertainError, and nothing is removed.
        """

    def discard(self) -> None:
        """Remove what this rank has written in this save; called where it is certain that nothing was published."""
        return


class StorageReader(ABC):
    """Executes load plans on some storage. One load calls, in this order:

    1. `initialize_reader`    every rank, only when `load` was given a `checkpoint_id` as well
    2. `load_metadata`        the coordinator (without collectives: every rank); the others are sent its answer
    3. `configure_reader`     every rank, with the metadata
    4. `optimize_local_plan`  every rank; the place to find that a file is missing, before any target is changed
    5. `optimize_global_plan` the coordinator, over all ranks' plans
    6. `execute_read`         every rank

    An exception in any step on any rank makes every rank raise.
    """

    @property
    def allow_pickle(self) -> bool:
        """Whether objects of this checkpoint may be unpickled, which can run code from it; as configured."""
        return config.current().allow_pickle

    @property
    def shares_page_cache(self) -> bool:
        """Whether ranks of one host that read the same bytes fetch them once; then broadcasting them gains nothing."""
        return False

    @property
    def reads_at_once(self) -> int:
        """Calls of `execute_read` that one rank may have under way, from threads; more than one where each is a journey
        across a network."""
        return 1

    @property
    def mismatch_advice(self) -> str:
        """What else to do where names are wanted that are not stored, once configured; it ends the error's message."""
        return ""

    def initialize_reader(self, checkpoint_id: str | Path) -> None:
        """Take the place to load from."""
        raise NotSupportedError(
            f"{type(self).__name__} takes no checkpoint_id; leave it out, or implement initialize_reader."
        )

    @abstractmethod
    def load_metadata(self) -> Metadata:
        """The global metadata, fresh.

        Raises:
            CheckpointNotFoundError, IncompleteCheckpointError: there is none.
        """

    def load_rank_metadata(self, rank: int) -> RankMetadata | None:
        """What ranks that saved without collectives left, as `rank` sees it; None when there is no such thing.

        Raises:
            IncompleteCheckpointError: there is some, but not one whole save.
        """
        return None

    @abstractmethod
    def configure_reader(self, metadata: Metadata, context: PlannerContext) -> None:
        """Start a new load."""

    def optimize_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """A plan that reads the same, better suited to this storage; raises where a file it needs is not sound."""
        return plan

    def optimize_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        """All ranks' plans, better suited to this storage."""
        return list(plans)

    @abstractmethod
    def execute_read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill every item of the plan."""


class RankMetadata(ABC):
    """A complete set of per-rank metadata, as a save without collectives leaves it."""

    @abstractmethod
    def own(self, world_size: int) -> Metadata | None:
        """What this rank stored, when `world_size` ranks load and as many saved; else None."""

    @abstractmethod
    def merged(self) -> Metadata:
        """What all ranks stored, as one."""


@dataclass(frozen=True, slots=True)
class WholePlan:
    """What all ranks write, and the metadata made of it: what the coordinator needs once they have written."""

    metadata: Metadata
    """Without storage."""
    counts: I64
    """How many items each rank writes."""
    nbytes: I64
    """What each item takes, rank by rank; -1 for an object of a cached plan, which may have any length."""
    order: I64
    """For each row of `metadata.chunks`, which of all items it is, rank by rank."""
    held: I64
    """For each box each rank holds (`held_boxes`), rank by rank, the row of `metadata.chunks` that is the same box, or
    -1; of copies that several ranks write, the first."""
    held_ends: I64
    """Where each rank's rows end in `held`."""

    @classmethod
    def of(cls, metadata: Metadata, plans: Sequence[SavePlan], locals_: Sequence[SavePlan]) -> WholePlan:
        """From every rank's final plan and the local plans these were made of.

        Raises:
            StateDictError: a plan holds a name that the metadata does not.
            StorageError: the plans hold other items than the metadata.
        """
        held = [held_boxes(local, final) for local, final in zip(locals_, plans, strict=True)]
        held_rows = entry_rows(metadata, held)
        same_names = all(plan.entries is mine.entries for plan, mine in zip(plans, held, strict=True))
        planned = _with_rows(plans, held_rows if same_names else entry_rows(metadata, plans))
        order = sort_order(planned.sort_keys())
        if not _same_rows(planned.take(order), metadata.chunks):
            raise StorageError(
                "the plans to be written are not the plans the metadata was made of; nothing was published."
            )
        return cls(
            metadata,
            np.array([len(plan) for plan in plans], dtype=np.int64),
            np.concatenate([plan.nbytes for plan in plans]),
            order.astype(np.int64),
            _match(metadata.chunks, _with_rows(held, held_rows)),
            ends_of(np.array([len(plan) for plan in held], dtype=np.int64)),
        )

    def held_by(self, rank: int) -> I64:
        """For each box `rank` holds, the row of `metadata.chunks` that is the same box, or -1."""
        return self.held[int(self.held_ends[rank - 1]) if rank else 0 : int(self.held_ends[rank])]

    def plans(self, storage_data: Mapping[str, str]) -> list[SavePlan]:
        """Every rank's plan, of the names of all."""
        position = np.empty_like(self.order)
        position[self.order] = np.arange(len(self.order))
        items = self.metadata.chunks.take(position)
        ends = ends_of(self.counts)
        return [
            SavePlan(self.metadata.entries, items.rows(start, end), self.nbytes[start:end], storage_data)
            for start, end in zip(starts_of(ends).tolist(), ends.tolist(), strict=True)
        ]

    def without_object_lengths(self) -> WholePlan:
        """The plan as it is cached: an object may be encoded to another length by the next save."""
        chunks, kinds = self.metadata.chunks, self.metadata.entries.kinds
        nbytes = self.nbytes.copy()
        nbytes[self.order[kinds[chunks.entry] == EntryKind.OBJECT]] = -1
        return replace(self, nbytes=nbytes)

    def to_bytes(self) -> bytes:
        """As it is cached: columns, no pickle."""
        columns: dict[str, npt.NDArray[np.generic]] = {
            **self.metadata.entries.to_columns(),
            **self.metadata.chunks.to_columns(),
            "item.count": self.counts,
            "item.nbytes": self.nbytes,
            "item.order": self.order,
            "held.row": self.held,
            "held.ends": self.held_ends,
        }
        return pack_columns(columns, self.metadata.settings)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> WholePlan:
        columns, settings = unpack_columns(data, where="a cached plan")
        return cls(
            Metadata(EntryTable.from_columns(columns), ChunkTable.from_columns(columns), settings=settings),
            column(columns, "item.count", np.int64),
            column(columns, "item.nbytes", np.int64),
            column(columns, "item.order", np.int64),
            column(columns, "held.row", np.int64),
            column(columns, "held.ends", np.int64),
        )


def held_boxes(local: SavePlan, final: SavePlan) -> SavePlan:
    """What a rank holds: the boxes of its local plan, then the parts that some of them are written in."""
    if final.split is None:
        return local
    volumes = local.chunks.volumes()
    itemsize = np.zeros(len(local.entries), dtype=np.int64)
    itemsize[local.chunks.entry] = local.nbytes // np.maximum(volumes, 1)
    # Names that were tied in the local plan, and are stored after all, have no boxes in it.
    parts = final.split.take(np.flatnonzero(itemsize[final.split.entry] > 0))
    nbytes = parts.volumes() * itemsize[parts.entry]
    return SavePlan(local.entries, concat_chunks([local.chunks, parts]), np.concatenate([local.nbytes, nbytes]))


def join_results(whole: WholePlan, results: Sequence[WriteResults]) -> WriteResults:
    """Where each row of the metadata's chunks was stored, once every planned item has its result of the planned length.

    Raises:
        StorageError: a rank's results do not fit its plan, or two ranks wrote one file.
    """
    _check_results(whole, results)
    names = [name for result in results for name in result.table.file_names]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise StorageError(f"several ranks wrote the same file: {twice[:5]}; nothing was published.")
    return _joined(results).take(whole.order)


def _side_by_side(tables: Sequence[StorageTable]) -> StorageTable:
    """All rows and all files, table after table."""
    first_file = starts_of(ends_of(np.array([len(table.file_names) for table in tables], dtype=np.int64)))
    files = [table.file.astype(np.int64) + first for table, first in zip(tables, first_file, strict=True)]
    return StorageTable(
        file=np.concatenate(files).astype(np.int32),
        offset=np.concatenate([table.offset for table in tables]),
        length=np.concatenate([table.length for table in tables]),
        crc_ends=ends_of(np.concatenate([table.crc_ends - starts_of(table.crc_ends) for table in tables])),
        crcs=np.concatenate([table.crcs for table in tables]),
        file_names=StringColumn.from_strings([name for table in tables for name in table.file_names]),
        file_sizes=np.concatenate([table.file_sizes for table in tables]),
        file_marks=np.concatenate([table.file_marks for table in tables]),
    )


def _with_rows(plans: Sequence[SavePlan], rows: Sequence[I64]) -> ChunkTable:
    """The boxes of all plans, rank by rank, of other entries: `rows` has one for each entry of each plan."""
    return concat_chunks(
        [plan.chunks.with_entry(row[plan.chunks.entry]) for plan, row in zip(plans, rows, strict=True)]
    )


def _match(chunks: ChunkTable, wanted: ChunkTable) -> I64:
    """For each box of `wanted` the first row of `chunks` that is the same box; -1 where there is none."""
    both = concat_chunks([chunks, wanted])
    keys = both.sort_keys()
    order = sort_order(keys)
    first = group_starts(keys, order)
    heads = order[first][np.cumsum(first) - 1]
    answer = np.empty(len(both), dtype=np.int64)
    answer[order] = np.where(heads < len(chunks), heads, -1)
    return answer[len(chunks) :]


def entry_rows(metadata: Metadata, plans: Sequence[SavePlan]) -> list[I64]:
    """For each plan, the row of `metadata.entries` of each of the plan's entries.

    Raises:
        StateDictError: a plan holds a name that the metadata does not.
    """
    names, owners = metadata.entries.names(), metadata.entries.owners
    known = dict(zip(names, itertools.count(), strict=False))
    owned = {(names[row], int(owners[row])): row for row in np.flatnonzero(owners >= 0).tolist()}
    group, _ = group_tables([plan.entries for plan in plans])
    shared: dict[int, I64] = {}
    rows: list[I64] = []
    for plan, table in zip(plans, group, strict=True):
        if table not in shared:
            mine = plan.entries.names()
            try:
                shared[table] = np.fromiter(map(known.__getitem__, mine), dtype=np.int64, count=len(mine))
            except KeyError as error:
                lost = error.args[0].encode("latin-1").decode("utf-8", "replace")
                raise StateDictError(f"the global plan lost the entry {lost!r}.") from None
        own = np.flatnonzero(plan.entries.owners >= 0).tolist()
        if not own:
            rows.append(shared[table])
            continue
        each = shared[table].copy()
        for row in own:
            owner = int(plan.entries.owners[row])
            name = plan.entries.fqns[row].encode("utf-8", "surrogatepass").decode("latin-1")
            if (name, owner) not in owned:
                raise StateDictError(f"the global plan lost the entry {plan.entries.fqns[row]!r} of rank {owner}.")
            each[row] = owned[name, owner]
        rows.append(each)
    return rows


def _check_results(whole: WholePlan, results: Sequence[WriteResults]) -> None:
    ends = ends_of(whole.counts).tolist()
    for rank, (result, count, end) in enumerate(zip(results, whole.counts.tolist(), ends, strict=True)):
        if len(result) != count:
            raise StorageError(
                f"rank {rank} reported {len(result)} results for the {count} items it was to write; "
                "nothing was published."
            )
        planned = whole.nbytes[end - count : end]
        lengths = result.as_items().table.length
        wrong = np.flatnonzero((lengths != planned) & (planned >= 0))
        if len(wrong):
            item = int(wrong[0])
            entry = whole.metadata.chunks.entry[int(np.flatnonzero(whole.order == end - count + item)[0])]
            raise StorageError(
                f"rank {rank} stored {int(lengths[item])} bytes of "
                f"{whole.metadata.entries.fqns[int(entry)]!r}, planned were {int(planned[item])} "
                f"({len(wrong)} items differ); nothing was published."
            )


def _same_rows(left: ChunkTable, right: ChunkTable) -> bool:
    pairs = (
        (left.entry, right.entry),
        (left.ends, right.ends),
        (left.offsets, right.offsets),
        (left.sizes, right.sizes),
    )
    return all(np.array_equal(a, b) for a, b in pairs)
