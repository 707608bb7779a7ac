"""The contracts of a storage writer and a storage reader, and what a write reports back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpdcp import config
from hpdcp.container import StringColumn, pack_columns, unpack_columns
from hpdcp.errors import NotSupportedError, StateDictError, StorageError
from hpdcp.metadata import Metadata, StorageInfo, StorageTable
from hpdcp.planner import LoadPlan, LoadPlanner, PlannerContext, SavePlan, SavePlanner
from hpdcp.tables import I64, ChunkTable, concat_chunks, ends_of, sort_order, starts_of, take_runs


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

    def __init__(self, table: StorageTable) -> None:
        self.table = table

    @classmethod
    def build(cls, results: Sequence[WriteResult], files: Sequence[FileRecord]) -> WriteResults:
        """From one result for each item of the plan, in order, and every file they name."""
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
        table = self.table
        crc_ends, positions = take_runs(table.crc_ends, rows)
        return WriteResults(
            replace(
                table,
                file=table.file[rows],
                offset=table.offset[rows],
                length=table.length[rows],
                crc_ends=crc_ends,
                crcs=table.crcs[positions],
            )
        )

    def to_bytes(self) -> bytes:
        """For the exchange between ranks: columns, no pickle."""
        return pack_columns(self.table.to_columns(), {})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> WriteResults:
        columns, _ = unpack_columns(data, where="a rank's write results")
        return cls(StorageTable.from_columns(columns))


class StorageWriter(ABC):
    """Executes save plans on some storage. One save calls, in this order:

    1. `initialize_writer`     every rank, only when `save` was given a `checkpoint_id` as well
    2. `configure_writer`      every rank
    3. `optimize_local_plan`   every rank; nothing may be changed on storage yet
    4. `optimize_global_plan`  the coordinator, over all ranks' final plans (without collectives: every rank, its own)
    5. `execute_write`         every rank; its data is durable when it returns
    6. `finalize_checkpoint`   the coordinator, once every rank has written everything: the commit
    7. `discard`               instead of 6 every rank, when some rank failed: remove what this rank wrote

    An exception in any step on any rank makes every rank raise, and nothing is published.
    """

    def initialize_writer(self, checkpoint_id: str | Path) -> None:
        """Take the place to save to."""
        raise NotSupportedError(
            f"{type(self).__name__} takes no checkpoint_id; leave it out, or implement initialize_writer."
        )

    @abstractmethod
    def configure_writer(self, context: PlannerContext) -> None:
        """Start a new save."""

    def optimize_local_plan(self, plan: SavePlan) -> SavePlan:
        """A plan of the same items, better suited to this storage."""
        return plan

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


def join_results(metadata: Metadata, plans: Sequence[SavePlan], results: Sequence[WriteResults]) -> StorageTable:
    """Where each row of `metadata.chunks` was stored, once every planned item has its result of the planned length.

    Raises:
        StorageError: a rank's results do not fit its plan, or two ranks wrote one file.
    """
    for rank, (plan, result) in enumerate(zip(plans, results, strict=True)):
        _check_results(rank, plan, result)
    planned = concat_chunks(
        [
            plan.chunks.with_entry(row[plan.chunks.entry])
            for plan, row in zip(plans, entry_rows(metadata, plans), strict=True)
        ]
    )
    order = sort_order(planned.sort_keys())
    if not _same_rows(planned.take(order), metadata.chunks):
        raise StorageError(
            "the plans that were written are not the plans the metadata was made of; nothing was published."
        )
    tables = [result.table for result in results]
    names = [name for table in tables for name in table.file_names]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise StorageError(f"several ranks wrote the same file: {twice[:5]}; nothing was published.")
    first_file = starts_of(ends_of(np.array([len(table.file_names) for table in tables], dtype=np.int64)))
    files = [table.file.astype(np.int64) + first for table, first in zip(tables, first_file, strict=True)]
    joined = StorageTable(
        file=np.concatenate(files).astype(np.int32),
        offset=np.concatenate([table.offset for table in tables]),
        length=np.concatenate([table.length for table in tables]),
        crc_ends=ends_of(np.concatenate([table.crc_ends - starts_of(table.crc_ends) for table in tables])),
        crcs=np.concatenate([table.crcs for table in tables]),
        file_names=StringColumn.from_strings(names),
        file_sizes=np.concatenate([table.file_sizes for table in tables]),
        file_marks=np.concatenate([table.file_marks for table in tables]),
    )
    return WriteResults(joined).take(order).table


def entry_rows(metadata: Metadata, plans: Sequence[SavePlan]) -> list[I64]:
    """For each plan, the row of `metadata.entries` of each of the plan's entries.

    Raises:
        StateDictError: a plan holds a name that the metadata does not.
    """
    known: Mapping[tuple[str, int], int] = {
        name: row for row, name in enumerate(zip(metadata.entries.fqns, metadata.entries.owners.tolist(), strict=True))
    }
    rows = []
    for plan in plans:
        names = zip(plan.entries.fqns, plan.entries.owners.tolist(), strict=True)
        try:
            rows.append(np.fromiter((known[name] for name in names), dtype=np.int64, count=len(plan.entries)))
        except KeyError as error:
            raise StateDictError(f"the global plan lost the entry {error.args[0][0]!r}.") from None
    return rows


def _check_results(rank: int, plan: SavePlan, result: WriteResults) -> None:
    if len(result) != len(plan):
        raise StorageError(
            f"rank {rank} reported {len(result)} results for the {len(plan)} items it was to write; "
            "nothing was published."
        )
    wrong = np.flatnonzero(result.table.length != plan.nbytes)
    if len(wrong):
        item = plan.item(int(wrong[0]))
        raise StorageError(
            f"rank {rank} stored {int(result.table.length[wrong[0]])} bytes of {item.index.fqn!r}, planned were "
            f"{item.nbytes} ({len(wrong)} items differ); nothing was published."
        )


def _same_rows(left: ChunkTable, right: ChunkTable) -> bool:
    pairs = (
        (left.entry, right.entry),
        (left.ends, right.ends),
        (left.offsets, right.offsets),
        (left.sizes, right.sizes),
    )
    return all(np.array_equal(a, b) for a, b in pairs)
