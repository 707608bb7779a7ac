"""The plan of a save: what one rank has on record, which of it that rank writes, and what ranks exchange first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from hpdcp._format.columns import (
    I64,
    ChunkTable,
    Columns,
    Entry,
    EntryKind,
    EntryTable,
    column,
)
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import MetadataIndex
from hpdcp._state.dtypes import itemsize_of


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One chunk of a tensor, or one object, to store."""

    index: MetadataIndex
    kind: EntryKind
    """TENSOR or OBJECT."""
    nbytes: int
    """Exactly what will be stored."""


@dataclass(frozen=True, slots=True)
class Redistribution:
    """What a rank sends to others before anything is written, and receives from them.

    For layouts that store boxes which no rank holds all of: each rank puts its part of such boxes into a file, and once
    all have done so, the rank that writes a box reads the parts of it from these files.
    """

    sent: ChunkTable
    """Boxes of what this rank holds, one after another in its file."""
    received: ChunkTable
    """Parts of items of the plan; those of one item together are all of it."""
    item: I64
    """For each of `received`, the row of the plan it is a part of."""
    sender: I64
    """For each of `received`, the rank whose file it is in."""
    offset: I64
    """For each of `received`, its first byte there."""

    def of_items(self, rows: I64) -> Redistribution:
        """What the items in these rows receive, as rows of the plan that has only them; nothing is sent."""
        position = np.full(int(max(self.item.max(initial=-1), rows.max(initial=-1))) + 1, -1, dtype=np.int64)
        position[rows] = np.arange(len(rows))
        kept = np.flatnonzero(position[self.item] >= 0)
        return Redistribution(
            self.sent.rows(0, 0),
            self.received.take(kept),
            position[self.item[kept]],
            self.sender[kept],
            self.offset[kept],
        )

    def to_columns(self) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """Named arrays, from which `from_columns` makes it again."""
        return {
            **self.sent.to_columns("sent."),
            **self.received.to_columns("received."),
            "received.item": self.item,
            "received.sender": self.sender,
            "received.at": self.offset,
        }

    @classmethod
    def from_columns(cls, columns: Columns) -> Redistribution:
        return cls(
            ChunkTable.from_columns(columns, "sent."),
            ChunkTable.from_columns(columns, "received."),
            column(columns, "received.item", np.int64),
            column(columns, "received.sender", np.int64),
            column(columns, "received.at", np.int64),
        )


@dataclass(frozen=True, slots=True)
class ComparedBoxes:
    """Which boxes of its local plan a rank sends checksums of, since other ranks hold them too."""

    rows: I64
    in_full: npt.NDArray[np.bool_]
    """Whether of all bytes, instead of samples."""


_revisions: Final = itertools.count(1)


@dataclass(frozen=True, eq=False)
class SavePlan:
    """What one rank has on record and what it writes; held as columns.

    `entries` may hold names without items: a tensor whose shard on this rank is empty is recorded all the same.
    """

    entries: EntryTable
    chunks: ChunkTable
    """The items' boxes; `chunks.entry` is a row of `entries`."""
    nbytes: I64
    """What each item takes; -1 for an object of a cached plan, whose length is not known before it is encoded."""
    storage_data: Mapping[str, str] = field(default_factory=dict)
    """What a storage writer adds in its `optimize_` steps, for ranks that write this; planners pass it on untouched."""
    _: KW_ONLY
    compared: ComparedBoxes | None = None
    """In the part that a rank is told to write: what it sends checksums of; None: nothing."""
    redistribution: Redistribution | None = None
    """What passes between ranks first, where the layout has a rank write boxes that several hold parts of."""
    notes: Columns = field(default_factory=dict)
    """Columns of numbers in which the coordinator's layout tells this rank's more about the entries."""
    revision: int = field(default_factory=lambda: next(_revisions))
    """Of the items and their entries: a copy that differs in nothing of them has the same, all others another."""
    selected: tuple[int, I64] | None = None
    """The revision of the plan that the items were selected from, and which of its rows they are."""

    @classmethod
    def build(cls, entries: Sequence[Entry], items: Sequence[WriteItem]) -> SavePlan:
        """A plan of these items; each item's (fqn, owner) must be among `entries`."""
        row = {(entry.fqn, entry.owner): i for i, entry in enumerate(entries)}
        return cls(
            EntryTable.from_entries(entries),
            ChunkTable.from_boxes(
                [row[item.index.fqn, item.index.owner] for item in items],
                [(item.index.offsets, item.index.sizes) for item in items],
            ),
            np.array([item.nbytes for item in items], dtype=np.int64),
        )

    @cached_property
    def fqns(self) -> Sequence[str]:
        """The name of each row of `entries`."""
        return list(self.entries.fqns)

    @property
    def items(self) -> Sequence[WriteItem]:
        """The items in order, each made when it is looked at."""
        return _LazyItems(self)

    def item(self, row: int) -> WriteItem:
        """Item number `row`."""
        return WriteItem(
            self.index_of(self.chunks, row),
            EntryKind(int(self.entries.kinds[int(self.chunks.entry[row])])),
            int(self.nbytes[row]),
        )

    def index_of(self, chunks: ChunkTable, row: int) -> MetadataIndex:
        """The name of one of `chunks`, which may be other boxes of the same entries."""
        entry = int(chunks.entry[row])
        owner = int(self.entries.owners[entry])
        return MetadataIndex(self.fqns[entry], *chunks.box(row), None if owner < 0 else owner)

    def __len__(self) -> int:
        return len(self.nbytes)

    def select(self, rows: np.ndarray[Any, np.dtype[np.integer[Any]]]) -> SavePlan:
        """The same names, these items only."""
        chosen: I64 = np.asarray(rows, dtype=np.int64)
        passed = None if self.redistribution is None else self.redistribution.of_items(chosen)
        return SavePlan(
            self.entries,
            self.chunks.take(chosen),
            self.nbytes[chosen],
            self.storage_data,
            redistribution=passed,
            notes=self.notes,
            selected=(self.revision, chosen),
        )

    def with_storage_data(self, storage_data: Mapping[str, str]) -> SavePlan:
        """The same plan, carrying `storage_data`."""
        return replace(self, storage_data=storage_data)

    def with_compared(self, compared: ComparedBoxes) -> SavePlan:
        """The same plan, with what is compared."""
        return replace(self, compared=compared)

    def with_nbytes(self, nbytes: I64) -> SavePlan:
        """The same items, of these lengths."""
        return replace(self, nbytes=nbytes, revision=next(_revisions))

    def without_object_lengths(self) -> SavePlan:
        """The plan as it is cached: an object may be encoded to another length by the next save."""
        objects = self.entries.kinds[self.chunks.entry] == EntryKind.OBJECT
        return self.with_nbytes(np.where(objects, np.int64(-1), self.nbytes))

    def received_rows(self) -> I64:
        """Rows of the items that are made of what ranks send one another, and that the planner is not asked for."""
        return np.zeros(0, dtype=np.int64) if self.redistribution is None else np.unique(self.redistribution.item)

    def sent_plan(self) -> SavePlan:
        """What this rank sends to others, as a plan of its own."""
        assert self.redistribution is not None
        sent = self.redistribution.sent
        itemsize = np.array([itemsize_of(name) for name in self.entries.dtype_names], dtype=np.int64)
        nbytes = sent.volumes() * itemsize[self.entries.dtype_codes[sent.entry]]
        return SavePlan(self.entries, sent, nbytes, self.storage_data)

    def rows_in(self, plan: SavePlan) -> I64 | None:
        """Which items of `plan` these are, where they were selected from it; else None."""
        return self.selected[1] if self.selected is not None and self.selected[0] == plan.revision else None

    def to_bytes(self) -> bytes:
        """For the exchange between ranks: columns, no pickle."""
        return pack_columns({**self.entries.to_columns(), **self._item_columns()}, self.storage_data)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> SavePlan:
        columns, storage_data = unpack_columns(data, where="a save plan")
        return cls._from_items(EntryTable.from_columns(columns), columns, storage_data)

    def to_part(self, local: SavePlan) -> bytes:
        """As `to_bytes`, for the rank that has `local`: without what it can take from there."""
        compared: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
        if self.compared is not None:
            compared = {"compared.row": self.compared.rows, "compared.in_full": self.compared.in_full.view(np.uint8)}
        if self.revision == local.revision:
            return pack_columns(compared, self.storage_data)
        rows = self.rows_in(local)
        if rows is not None:
            return pack_columns({"part.rows": rows, **compared}, self.storage_data)
        names = {} if self.entries is local.entries else self.entries.to_columns()
        return pack_columns({**names, **self._item_columns(), **compared}, self.storage_data)

    @classmethod
    def from_part(cls, data: bytes | memoryview, local: SavePlan) -> SavePlan:
        """What `to_part` wrote for the rank that has `local`."""
        columns, storage_data = unpack_columns(data, where="a rank's part of a save plan")
        if "part.rows" in columns:
            part = local.select(column(columns, "part.rows", np.int64)).with_storage_data(storage_data)
        elif "item.nbytes" in columns:
            entries = EntryTable.from_columns(columns) if "entry.kind" in columns else local.entries
            part = cls._from_items(entries, columns, storage_data)
        else:
            part = local.with_storage_data(storage_data)
        if "compared.row" not in columns:
            return part
        in_full = column(columns, "compared.in_full", np.uint8).astype(np.bool_)
        return part.with_compared(ComparedBoxes(column(columns, "compared.row", np.int64), in_full))

    def _item_columns(self) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        passed = {} if self.redistribution is None else self.redistribution.to_columns()
        notes = {f"note.{name}": values for name, values in self.notes.items()}
        return {**self.chunks.to_columns(), "item.nbytes": self.nbytes, **passed, **notes}

    @classmethod
    def _from_items(cls, entries: EntryTable, columns: Columns, storage_data: Mapping[str, str]) -> SavePlan:
        return cls(
            entries,
            ChunkTable.from_columns(columns),
            column(columns, "item.nbytes", np.int64),
            storage_data,
            redistribution=Redistribution.from_columns(columns) if "sent.entry" in columns else None,
            notes={name.removeprefix("note."): values for name, values in columns.items() if name.startswith("note.")},
        )


class _LazyItems(Sequence[WriteItem]):
    __slots__ = ("_plan",)

    def __init__(self, plan: SavePlan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan)

    @overload
    def __getitem__(self, row: int) -> WriteItem: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[WriteItem]: ...
    def __getitem__(self, row: int | slice) -> WriteItem | Sequence[WriteItem]:
        rows = range(len(self))[row]
        return self._plan.item(rows) if isinstance(rows, int) else [self._plan.item(i) for i in rows]

    def __iter__(self) -> Iterator[WriteItem]:
        return map(self._plan.item, range(len(self)))
