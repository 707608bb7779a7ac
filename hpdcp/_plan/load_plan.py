"""What one rank reads: items, the chunks they fill, and which of these one rank reads for several.

Held as columns, like a save plan; items and targets become objects when somebody looks at them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._format.columns import I64, ChunkTable, Columns, EntryKind, column, strings_from, strings_to
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import MetadataIndex
from hpdcp._format.strings import StringColumn
from hpdcp._plan.shared_boxes import DIRECT, ON_DEVICE, SharedBox, SharedColumns, offsets_and_sizes

_REVISIONS: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One box to copy from a stored chunk into a local tensor; or one object to read."""

    dest_index: MetadataIndex
    """The destination chunk, as this rank holds it."""
    storage_row: int
    """Row of the stored chunk in `Metadata.chunks`; -1 for a box that another rank reads and sends."""
    dest_offsets: tuple[int, ...]
    """Where the box starts in the destination chunk."""
    storage_offsets: tuple[int, ...]
    """Where the box starts in the stored chunk."""
    lengths: tuple[int, ...]
    """The box's sizes."""
    kind: EntryKind = EntryKind.TENSOR


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """One destination chunk, as its rank holds it."""

    index: MetadataIndex
    dtype: str
    """torch's name of the target's dtype."""
    direct: bool
    """Whether bytes of that dtype can be received straight into it: contiguous memory."""
    on_device: bool = False
    """Whether it is on the device that this rank computes on, so that a process group of the device reaches it."""


def _flags(target: LoadTarget) -> int:
    return DIRECT * target.direct | ON_DEVICE * target.on_device


@dataclass(frozen=True, slots=True)
class TargetColumns:
    """Destination chunks, row by row."""

    boxes: ChunkTable
    """`entry` is a row of the plan's names."""
    owners: I64
    kinds: npt.NDArray[np.uint8]
    dtypes: npt.NDArray[np.int32]
    """Row of the plan's dtype names; -1 where the planner does not say, so that the chunk is never shared."""
    direct: npt.NDArray[np.uint8]
    """`DIRECT`, `ON_DEVICE`, both or none."""


@dataclass(frozen=True, slots=True)
class ItemColumns:
    """Boxes to read, row by row."""

    boxes: ChunkTable
    """`entry` is a row of the targets; offsets are in the destination chunk."""
    storage_offsets: I64
    """In the stored chunk; laid out like `boxes.offsets`."""
    storage_row: I64


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
                np.array([0 if target is None else _flags(target) for target in described], dtype=np.uint8),
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

    def items_at(self, rows: npt.NDArray[np.integer]) -> list[ReadItem]:
        """The items of these rows."""
        built = self.__dict__.get("items")
        if built is not None:
            return [built[row] for row in rows.tolist()]
        columns, indexes = self.item_columns, self.indexes
        boxes = columns.boxes
        begins = ChunkTable(boxes.entry, boxes.ends, columns.storage_offsets, boxes.sizes)
        kinds = [EntryKind(kind) for kind in self.target_columns.kinds.tolist()]
        picked = zip(
            boxes.entry[rows].tolist(),
            columns.storage_row[rows].tolist(),
            offsets_and_sizes(boxes.take(rows)),
            offsets_and_sizes(begins.take(rows)),
            strict=True,
        )
        return [
            ReadItem(indexes[target], storage_row, offsets, storage_offsets, lengths, kinds[target])
            for target, storage_row, (offsets, lengths), (storage_offsets, _) in picked
        ]

    @cached_property
    def shared(self) -> tuple[SharedBox, ...]:
        """What one rank reads for several, in the order in which all walk it."""
        return self.shared_columns.as_boxes(self.indexes)

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
        if self.revision == shared.revision:
            rest = ~np.isin(self.item_columns.boxes.entry, filled)
            return LoadPlan.build(self.items_at(np.flatnonzero(rest)))
        indexes = {shared.indexes[row] for row in set(filled.tolist())}
        return LoadPlan.build([item for item in self.items if item.dest_index not in indexes])

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


def _terms_in(columns: Columns) -> bytes:
    return column(columns, "broadcast.terms", np.uint8).tobytes()
