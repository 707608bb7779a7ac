"""What one rank reads: items, the chunks they fill, and which of these one rank reads for several.

Held as columns, like a save plan; items and targets become objects when somebody looks at them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from hpdcp._format.columns import (
    ChunkTable,
    Columns,
    EntryKind,
    column,
    concat_chunks,
    strings_from,
    strings_to,
)
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import MetadataIndex
from hpdcp._format.strings import StringColumn
from hpdcp._plan.read_items import ItemColumns, LoadTarget, ReadItem, TargetColumns
from hpdcp._plan.shared_boxes import SharedBox, SharedColumns, offsets_and_sizes

__all__ = ["ItemColumns", "LoadPlan", "LoadTarget", "PlannedItems", "ReadItem", "TargetColumns"]

_REVISIONS: Final = itertools.count()


class LoadPlan:
    """What one rank reads. Immutable."""

    def __init__(
        self,
        names: StringColumn,
        dtype_names: StringColumn,
        targets: TargetColumns,
        items: ItemColumns,
        shared: SharedColumns | None = None,
        storage_data: Mapping[str, str] | None = None,
        *,
        broadcast_terms: bytes = b"",
        revision: int | None = None,
    ) -> None:
        self.names = names
        self.dtype_names = dtype_names
        self.target_columns = targets
        self.item_columns = items
        self.shared_columns = shared or SharedColumns.none()
        self.storage_data: Mapping[str, str] = storage_data or {}
        """What storage readers of several ranks tell one another; planners pass it on untouched."""
        self.broadcast_terms = broadcast_terms
        """What ranks tell one another of broadcasts, encoded by `hpdcp._broadcast.terms`: on the way to the coordinator
        what this rank asks for, on the way back what was decided."""
        self.revision = next(_REVISIONS) if revision is None else revision
        """Equal, in one process, for plans of the same targets and items."""

    @classmethod
    def build(cls, items: Sequence[ReadItem], targets: Iterable[LoadTarget] = ()) -> LoadPlan:
        """A plan of these items. Chunks that are not among `targets` are read by each rank for itself."""
        known = {target.index: target for target in targets}
        kinds = {item.dest_index: item.kind for item in items} | dict.fromkeys(known, EntryKind.TENSOR)
        rows = {index: row for row, index in enumerate(kinds)}
        names = {fqn: row for row, fqn in enumerate(dict.fromkeys(index.fqn for index in kinds))}
        dtypes = {name: row for row, name in enumerate(dict.fromkeys(target.dtype for target in known.values()))}
        described = [known.get(index) for index in kinds]
        plan = cls(
            StringColumn.from_strings(names),
            StringColumn.from_strings(dtypes),
            TargetColumns(
                ChunkTable.from_boxes([names[i.fqn] for i in kinds], [(i.offsets, i.sizes) for i in kinds]),
                np.array([-1 if index.owner is None else index.owner for index in kinds], dtype=np.int64),
                np.array(list(kinds.values()), dtype=np.uint8),
                np.array([-1 if target is None else dtypes[target.dtype] for target in described], dtype=np.int32),
                np.array([0 if target is None else target.flags for target in described], dtype=np.uint8),
            ),
            ItemColumns(
                ChunkTable.from_boxes(
                    [rows[item.dest_index] for item in items], [(item.dest_offsets, item.lengths) for item in items]
                ),
                np.array([x for item in items for x in item.storage_offsets], dtype=np.int64),
                np.array([item.storage_row for item in items], dtype=np.int64),
            ),
        )
        plan.items = tuple(items)
        plan.indexes = list(kinds)
        return plan

    @classmethod
    def joined(cls, first: LoadPlan, second: LoadPlan) -> LoadPlan:
        """What both read: the targets of `first`, then those of `second`, and their items likewise."""
        if not len(second.target_columns.kinds):
            return first
        if not len(first.target_columns.kinds):
            return second
        a, b = first.target_columns, second.target_columns
        dtypes = {name: row for row, name in enumerate(dict.fromkeys([*first.dtype_names, *second.dtype_names]))}
        # A last row for "not said", which is -1.
        a_rows, b_rows = (
            np.array([*(dtypes[name] for name in plan.dtype_names), -1], dtype=np.int32) for plan in (first, second)
        )
        return cls(
            _joined_strings(first.names, second.names),
            StringColumn.from_strings(dtypes),
            TargetColumns(
                concat_chunks([a.boxes, b.boxes.with_entry(b.boxes.entry + len(first.names))]),
                np.concatenate([a.owners, b.owners]),
                np.concatenate([a.kinds, b.kinds]),
                np.concatenate([a_rows[a.dtypes], b_rows[b.dtypes]]),
                np.concatenate([a.direct, b.direct]),
            ),
            _joined_items(first.item_columns, second.item_columns, shift=len(a.kinds)),
        )

    @cached_property
    def indexes(self) -> list[MetadataIndex]:
        """The destination chunk of each row of the targets."""
        columns, names = self.target_columns, list(self.names)
        rows = zip(columns.boxes.entry.tolist(), offsets_and_sizes(columns.boxes), columns.owners.tolist(), strict=True)
        return [
            MetadataIndex(names[entry], offsets, sizes, None if owner < 0 else owner)
            for entry, (offsets, sizes), owner in rows
        ]

    @cached_property
    def items(self) -> tuple[ReadItem, ...]:
        """What to read, in order."""
        return tuple(self.items_at(np.arange(len(self))))

    @property
    def planned(self) -> PlannedItems:
        """As `items`; an object is made only of what somebody looks at."""
        return PlannedItems(self, np.arange(len(self)))

    def items_at(self, rows: npt.NDArray[np.integer]) -> list[ReadItem]:
        """The items of these rows."""
        built = self.__dict__.get("items")
        if built is not None:
            return [built[row] for row in rows.tolist()]
        if not len(rows):
            return []
        columns, indexes = self.item_columns.take(rows), self.indexes
        boxes = columns.boxes
        begins = ChunkTable(boxes.entry, boxes.ends, columns.storage_offsets, boxes.sizes)
        picked = zip(
            boxes.entry.tolist(),
            self.target_columns.kinds[boxes.entry].tolist(),
            columns.storage_row.tolist(),
            offsets_and_sizes(boxes),
            offsets_and_sizes(begins),
            strict=True,
        )
        return [
            ReadItem(indexes[target], storage_row, offsets, storage_offsets, lengths, EntryKind(kind))
            for target, kind, storage_row, (offsets, lengths), (storage_offsets, _) in picked
        ]

    @cached_property
    def shared(self) -> tuple[SharedBox, ...]:
        """What one rank reads for several, in the order in which all walk it."""
        return self.shared_columns.as_boxes(self.indexes) if len(self.shared_columns.boxes) else ()

    def __len__(self) -> int:
        return len(self.item_columns.storage_row)

    def with_storage_data(self, storage_data: Mapping[str, str]) -> LoadPlan:
        """The same plan, carrying `storage_data`."""
        return self._changed(self.shared_columns, storage_data, self.broadcast_terms)

    def with_shared(self, shared: SharedColumns) -> LoadPlan:
        """The same plan, of which `shared` is read by one rank for several."""
        return self._changed(shared, self.storage_data, self.broadcast_terms)

    def with_broadcast_terms(self, terms: bytes) -> LoadPlan:
        """The same plan, carrying `terms`."""
        return self._changed(self.shared_columns, self.storage_data, terms)

    def without_shared(self, shared: LoadPlan) -> LoadPlan:
        """What is left to read of this plan once all that `shared` has one rank read for several is there.

        `shared` is the plan this one was made of, or the same.
        """
        filled = shared.shared_columns.boxes.entry
        if self.revision != shared.revision:
            indexes = {shared.indexes[row] for row in set(filled.tolist())}
            filled = np.flatnonzero([index in indexes for index in self.indexes])
        rest = np.flatnonzero(~np.isin(self.item_columns.boxes.entry, filled))
        return LoadPlan(self.names, self.dtype_names, self.target_columns, self.item_columns.take(rest))

    def _changed(self, shared: SharedColumns, storage_data: Mapping[str, str], terms: bytes) -> LoadPlan:
        plan = LoadPlan(
            self.names,
            self.dtype_names,
            self.target_columns,
            self.item_columns,
            shared,
            storage_data,
            broadcast_terms=terms,
            revision=self.revision,
        )
        if "items" in self.__dict__:
            plan.items = self.items
        if "indexes" in self.__dict__:
            plan.indexes = self.indexes
        return plan

    def to_bytes(self) -> bytes:
        """For the exchange between ranks: columns, no pickle."""
        targets, items = self.target_columns, self.item_columns
        columns: dict[str, npt.NDArray[np.generic]] = {
            **targets.boxes.to_columns("target."),
            "target.owner": targets.owners,
            "target.kind": targets.kinds,
            "target.dtype": targets.dtypes,
            "target.direct": targets.direct,
            **items.boxes.to_columns("item."),
            "item.storage_offsets": items.storage_offsets,
            "item.storage_row": items.storage_row,
            **self._decided_columns(),
        }
        strings_to(columns, "name", self.names)
        strings_to(columns, "dtype_name", self.dtype_names)
        return pack_columns(columns, self.storage_data)

    def to_part(self, local: LoadPlan) -> bytes:
        """As `to_bytes`, for the rank that has `local`: without what it can take from there."""
        if self.revision == local.revision:
            return pack_columns(self._decided_columns(), self.storage_data)
        return self.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> LoadPlan:
        columns, storage_data = unpack_columns(data, where="a load plan")
        return cls._from_columns(columns, storage_data)

    @classmethod
    def from_part(cls, data: bytes | memoryview, local: LoadPlan) -> LoadPlan:
        """What `to_part` wrote for the rank that has `local`."""
        columns, storage_data = unpack_columns(data, where="a rank's part of a load plan")
        if "target.kind" in columns:
            return cls._from_columns(columns, storage_data)
        return local._changed(SharedColumns.from_columns(columns), storage_data, _terms_in(columns))

    def _decided_columns(self) -> dict[str, npt.NDArray[np.generic]]:
        terms = np.frombuffer(self.broadcast_terms, dtype=np.uint8)
        return {**self.shared_columns.to_columns(), "broadcast.terms": terms}

    @classmethod
    def _from_columns(cls, columns: Columns, storage_data: Mapping[str, str]) -> LoadPlan:
        return cls(
            strings_from(columns, "name"),
            strings_from(columns, "dtype_name"),
            TargetColumns(
                ChunkTable.from_columns(columns, "target."),
                column(columns, "target.owner", np.int64),
                column(columns, "target.kind", np.uint8),
                column(columns, "target.dtype", np.int32),
                column(columns, "target.direct", np.uint8),
            ),
            ItemColumns(
                ChunkTable.from_columns(columns, "item."),
                column(columns, "item.storage_offsets", np.int64),
                column(columns, "item.storage_row", np.int64),
            ),
            SharedColumns.from_columns(columns),
            storage_data,
            broadcast_terms=_terms_in(columns),
        )


class PlannedItems(Sequence[ReadItem]):
    """Items of a plan: objects for who looks at them, and columns for who works on all at once."""

    def __init__(self, plan: LoadPlan, rows: npt.NDArray[np.integer]) -> None:
        self.plan = plan
        self.rows = rows
        """Rows of the plan's items."""

    @classmethod
    def of(cls, items: Sequence[ReadItem]) -> PlannedItems:
        """`items` with columns, which those of a plan have already."""
        return items if isinstance(items, PlannedItems) else LoadPlan.build(items).planned

    @cached_property
    def columns(self) -> ItemColumns:
        """These items as columns, row by row."""
        return self.plan.item_columns.take(self.rows)

    @cached_property
    def fqns(self) -> list[str]:
        """The name of each item's destination."""
        names = list(self.plan.names)
        return [names[row] for row in self.plan.target_columns.boxes.entry[self.columns.boxes.entry].tolist()]

    @cached_property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """Each item's `EntryKind`."""
        return self.plan.target_columns.kinds[self.columns.boxes.entry]

    def take(self, which: npt.NDArray[np.integer]) -> PlannedItems:
        """Items of these, by their numbers here."""
        return self if len(which) == len(self) else PlannedItems(self.plan, self.rows[which])

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> PlannedItems: ...
    def __getitem__(self, index: int | slice) -> ReadItem | PlannedItems:
        if isinstance(index, slice):
            return PlannedItems(self.plan, self.rows[index])
        return self.plan.items_at(self.rows[[index]])[0]

    def __iter__(self) -> Iterator[ReadItem]:
        return iter(self.plan.items_at(self.rows))

    def __len__(self) -> int:
        return len(self.rows)


def _joined_strings(first: StringColumn, second: StringColumn) -> StringColumn:
    return StringColumn(
        np.concatenate([first.blob, second.blob]), np.concatenate([first.ends, second.ends + len(first.blob)])
    )


def _joined_items(first: ItemColumns, second: ItemColumns, *, shift: int) -> ItemColumns:
    """The items of both, those of `second` into targets that come `shift` rows later."""
    return ItemColumns(
        concat_chunks([first.boxes, second.boxes.with_entry(second.boxes.entry + shift)]),
        np.concatenate([first.storage_offsets, second.storage_offsets]),
        np.concatenate([first.storage_row, second.storage_row]),
    )


def _terms_in(columns: Columns) -> bytes:
    return column(columns, "broadcast.terms", np.uint8).tobytes()
