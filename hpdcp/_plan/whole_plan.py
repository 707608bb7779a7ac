"""What all ranks write as one: the plan the coordinator keeps, and the ranks' results in terms of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hpdcp._base.errors import StateDictError, StorageError
from hpdcp._format.columns import (
    I64,
    ChunkTable,
    EntryKind,
    EntryTable,
    column,
    concat_chunks,
    ends_of,
    first_rows,
    group_tables,
    sort_order,
    starts_of,
)
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import Metadata
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import WriteResults


@dataclass(frozen=True, slots=True)
class TiedBoxes:
    """Boxes of names that some ranks tie to another name, while other ranks hold them as tensors of their own.

    The ranks that tie them have them in their local plans under the other name only.
    """

    rank: I64
    row: I64
    """Of the rank's local plan: the box under the other name, whose bytes these are."""
    box: I64
    """Row in `WholePlan.boxes`."""


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
    """For each box of each rank's local plan, rank by rank, its row in `boxes`; of copies that several ranks write, the
    first."""
    held_ends: I64
    """Where each rank's rows end in `held`."""
    unstored: ChunkTable
    """Boxes that ranks hold and that are stored as other boxes, each once."""
    tied: TiedBoxes

    @classmethod
    def of(cls, metadata: Metadata, plans: Sequence[SavePlan], locals_: Sequence[SavePlan]) -> WholePlan:
        """From every rank's final plan and the local plans these were made of.

        Raises:
            StateDictError: a plan holds a name that the metadata does not.
            StorageError: the plans hold other items than the metadata.
        """
        held_rows = entry_rows(metadata, locals_)
        same_names = all(plan.entries is mine.entries for plan, mine in zip(plans, locals_, strict=True))
        planned = _with_rows(plans, held_rows if same_names else entry_rows(metadata, plans))
        order = sort_order(planned.sort_keys())
        if not _same_rows(planned.take(order), metadata.chunks):
            raise StorageError(
                "the plans to be written are not the plans the metadata was made of; nothing was published."
            )
        ranks, rows, boxes = _tied_boxes(metadata, locals_, held_rows)
        mine = _with_rows(locals_, held_rows)
        held, unstored = _match(metadata.chunks, concat_chunks([mine, boxes]))
        return cls(
            metadata,
            np.array([len(plan) for plan in plans], dtype=np.int64),
            np.concatenate([plan.nbytes for plan in plans]),
            order.astype(np.int64),
            held[: len(mine)],
            ends_of(np.array([len(plan) for plan in locals_], dtype=np.int64)),
            unstored,
            TiedBoxes(ranks, rows, held[len(mine) :]),
        )

    @property
    def boxes(self) -> ChunkTable:
        """`metadata.chunks`, then `unstored`."""
        return concat_chunks([self.metadata.chunks, self.unstored])

    def held_by(self, rank: int) -> I64:
        """For each box of `rank`'s local plan, its row in `boxes`."""
        return self.held[int(self.held_ends[rank - 1]) if rank else 0 : int(self.held_ends[rank])]

    def writers(self) -> I64:
        """For each row of `metadata.chunks`, the rank that writes it."""
        return np.searchsorted(ends_of(self.counts), self.order, side="right").astype(np.int64)

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
            **self.unstored.to_columns("unstored."),
            "tied.rank": self.tied.rank,
            "tied.row": self.tied.row,
            "tied.box": self.tied.box,
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
            ChunkTable.from_columns(columns, "unstored."),
            TiedBoxes(*(column(columns, f"tied.{name}", np.int64) for name in ("rank", "row", "box"))),
        )


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
    return WriteResults.concatenated(results).take(whole.order)


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


def _with_rows(plans: Sequence[SavePlan], rows: Sequence[I64]) -> ChunkTable:
    """The boxes of all plans, rank by rank, of other entries: `rows` has one for each entry of each plan."""
    return concat_chunks(
        [plan.chunks.with_entry(row[plan.chunks.entry]) for plan, row in zip(plans, rows, strict=True)]
    )


def _tied_boxes(metadata: Metadata, locals_: Sequence[SavePlan], rows: Sequence[I64]) -> tuple[I64, I64, ChunkTable]:
    """Of the names that a rank ties and the metadata has as tensors: each box's rank, its row there, and the box."""
    ranks: list[int] = []
    found: list[int] = []
    entries: list[int] = []
    boxes: list[ChunkTable] = []
    for rank, (plan, merged) in enumerate(zip(locals_, rows, strict=True)):
        contested = plan.entries.kinds == EntryKind.ALIAS
        if contested.any():
            contested &= metadata.entries.kinds[merged] == EntryKind.TENSOR
        names = {name: entry for entry, name in enumerate(plan.entries.fqns)} if contested.any() else {}
        for entry in np.flatnonzero(contested).tolist():
            items = np.flatnonzero(plan.chunks.entry == names[plan.entries.targets[entry]])
            ranks += [rank] * len(items)
            found += items.tolist()
            entries += [int(merged[entry])] * len(items)
            boxes.append(plan.chunks.take(items))
    chunks = concat_chunks(boxes).with_entry(np.array(entries, dtype=np.int64))
    return np.array(ranks, dtype=np.int64), np.array(found, dtype=np.int64), chunks


def _match(chunks: ChunkTable, held: ChunkTable) -> tuple[I64, ChunkTable]:
    """For each of `held` the first row of `chunks` that is the same box, or a row past these of the returned boxes."""
    both = concat_chunks([chunks, held])
    rows = first_rows(both)[len(chunks) :]
    others = rows >= len(chunks)
    distinct, numbers = np.unique(rows[others], return_inverse=True)
    rows[others] = len(chunks) + numbers
    return rows, both.take(distinct)


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
