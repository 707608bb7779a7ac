"""What one rank reads: items, the chunks they fill, and which of these one rank reads for several.

Held as columns, like a save plan; items, targets and shared parts become objects when somebody looks at them.
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
from hpdcp._format.metadata import BroadcastInfo, MetadataIndex
from hpdcp._format.strings import StringColumn


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
    source: int | None = None
    """Rank that reads it for the replica group; None when each rank reads its own."""


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


DIRECT: Final = 1
ON_DEVICE: Final = 2


def _flags(target: LoadTarget) -> int:
    return DIRECT * target.direct | ON_DEVICE * target.on_device


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of a destination chunk that one rank reads for all that want it."""

    index: MetadataIndex
    """The destination chunk, the same on all of them."""
    offsets: tuple[int, ...]
    """Where the part starts in the chunk."""
    sizes: tuple[int, ...]
    stored_dtype: str
    """torch's name of the dtype of the bytes that are read and sent."""
    info: BroadcastInfo

    def as_item(self) -> ReadItem:
        """The part as a box to fill, wherever its bytes come from."""
        nowhere = (0,) * len(self.sizes)
        return ReadItem(self.index, -1, self.offsets, nowhere, self.sizes, source=self.info.source)


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
    source: I64
    """-1 where each rank reads its own."""


@dataclass(frozen=True, slots=True)
class SharedColumns:
    """Shared parts, row by row, in the order in which every rank walks them."""

    boxes: ChunkTable
    """`entry` is a row of the targets; offsets are in the destination chunk."""
    group: I64
    """Row of `groups`."""
    source: I64
    stored_dtype: npt.NDArray[np.int32]
    """Row of the shared dtype names."""
    transport_dtype: npt.NDArray[np.int32]
    direct: npt.NDArray[np.uint8]
    """`DIRECT`, `ON_DEVICE`, both or none."""
    dtype_names: StringColumn
    group_ends: I64
    group_ranks: I64
    """The groups that this rank shares with, each the ranks of one after another."""

    @classmethod
    def none(cls) -> SharedColumns:
        no_rows, no_codes = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
        boxes, names = ChunkTable.from_boxes([], []), StringColumn.from_strings([])
        return cls(boxes, no_rows, no_rows, no_codes, no_codes, np.zeros(0, dtype=np.uint8), names, no_rows, no_rows)

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The groups' ranks, in order."""
        bounds = [0, *self.group_ends.tolist()]
        ranks = self.group_ranks.tolist()
        return [tuple(ranks[a:b]) for a, b in itertools.pairwise(bounds)]

    def to_columns(self) -> dict[str, npt.NDArray[np.generic]]:
        columns: dict[str, npt.NDArray[np.generic]] = {
            **self.boxes.to_columns("shared."),
            "shared.group": self.group,
            "shared.source": self.source,
            "shared.stored_dtype": self.stored_dtype,
            "shared.transport_dtype": self.transport_dtype,
            "shared.direct": self.direct,
            "group.ends": self.group_ends,
            "group.ranks": self.group_ranks,
        }
        strings_to(columns, "shared.dtype_name", self.dtype_names)
        return columns

    @classmethod
    def from_columns(cls, columns: Columns) -> SharedColumns:
        return cls(
            ChunkTable.from_columns(columns, "shared."),
            column(columns, "shared.group", np.int64),
            column(columns, "shared.source", np.int64),
            column(columns, "shared.stored_dtype", np.int32),
            column(columns, "shared.transport_dtype", np.int32),
            column(columns, "shared.direct", np.uint8),
            strings_from(columns, "shared.dtype_name"),
            column(columns, "group.ends", np.int64),
            column(columns, "group.ranks", np.int64),
        )


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
    ) -> None:
        self.names = names
        self.dtype_names = dtype_names
        self.target_columns = targets
        self.item_columns = items
        self.shared_columns = shared or SharedColumns.none()
        self.storage_data: Mapping[str, str] = storage_data or {}

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
                np.array([-1 if item.source is None else item.source for item in items], dtype=np.int64),
            ),
        )
        plan.items = tuple(items)
        plan.indexes = list(kinds)
        return plan

    @cached_property
    def indexes(self) -> list[MetadataIndex]:
        """The destination chunk of each row of the targets."""
        columns, names = self.target_columns, list(self.names)
        rows = zip(columns.boxes.entry.tolist(), _boxes(columns.boxes), columns.owners.tolist(), strict=True)
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
            columns.source[rows].tolist(),
            _boxes(boxes.take(rows)),
            _boxes(begins.take(rows)),
            strict=True,
        )
        return [
            ReadItem(
                indexes[target],
                storage_row,
                offsets,
                storage_offsets,
                lengths,
                kinds[target],
                None if source < 0 else source,
            )
            for target, storage_row, source, (offsets, lengths), (storage_offsets, _) in picked
        ]

    @cached_property
    def shared(self) -> tuple[SharedPart, ...]:
        """Parts that one rank reads for several, in the order in which all walk them."""
        columns, indexes, groups = self.shared_columns, self.indexes, self.shared_columns.groups
        names = list(columns.dtype_names)
        infos: dict[tuple[int, int, int, int], BroadcastInfo] = {}
        found = []
        for target, (offsets, sizes), stored, *how in zip(
            columns.boxes.entry.tolist(),
            _boxes(columns.boxes),
            columns.stored_dtype.tolist(),
            columns.group.tolist(),
            columns.source.tolist(),
            columns.transport_dtype.tolist(),
            columns.direct.tolist(),
            strict=True,
        ):
            group, source, transport, direct = key = (how[0], how[1], how[2], how[3])
            info = infos.get(key)
            if info is None:
                info = infos[key] = BroadcastInfo(
                    groups[group], source, names[transport], bool(direct & DIRECT), bool(direct & ON_DEVICE)
                )
            found.append(SharedPart(indexes[target], offsets, sizes, names[stored], info))
        return tuple(found)

    def __len__(self) -> int:
        return len(self.item_columns.storage_row)

    def with_storage_data(self, storage_data: Mapping[str, str]) -> LoadPlan:
        """The same plan, carrying `storage_data`."""
        return self._with(self.shared_columns, storage_data)

    def with_shared(self, shared: SharedColumns) -> LoadPlan:
        """The same plan, of which `shared` is read by one rank for several."""
        return self._with(shared, self.storage_data)

    def _with(self, shared: SharedColumns, storage_data: Mapping[str, str]) -> LoadPlan:
        plan = LoadPlan(self.names, self.dtype_names, self.target_columns, self.item_columns, shared, storage_data)
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
            "item.source": items.source,
            **self.shared_columns.to_columns(),
        }
        strings_to(columns, "name", self.names)
        strings_to(columns, "dtype_name", self.dtype_names)
        return pack_columns(columns, self.storage_data)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> LoadPlan:
        columns, storage_data = unpack_columns(data, where="a load plan")
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
                column(columns, "item.source", np.int64),
            ),
            SharedColumns.from_columns(columns),
            storage_data,
        )


def _boxes(table: ChunkTable) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of every row."""
    offsets, sizes = table.offsets.tolist(), table.sizes.tolist()
    bounds = itertools.pairwise([0, *table.ends.tolist()])
    return [(tuple(offsets[a:b]), tuple(sizes[a:b])) for a, b in bounds]


def decision_bytes(plan: LoadPlan, local: LoadPlan) -> bytes:
    """A rank's part of the global plan; what the rank has in its local plan already is not sent back to it."""
    if plan.item_columns is local.item_columns and plan.target_columns is local.target_columns:
        return b"s" + pack_columns(plan.shared_columns.to_columns(), plan.storage_data)
    return b"w" + plan.to_bytes()


def decided_plan(decision: bytes, local: LoadPlan) -> LoadPlan:
    """The part that `decision_bytes` encoded, on the rank whose local plan is `local`."""
    if decision[:1] == b"w":
        return LoadPlan.from_bytes(memoryview(decision)[1:])
    columns, storage_data = unpack_columns(memoryview(decision)[1:], where="a load plan")
    return local.with_shared(SharedColumns.from_columns(columns)).with_storage_data(storage_data)


def cut_items(
    items: Sequence[ReadItem], offsets: tuple[int, ...], sizes: tuple[int, ...], source: int
) -> list[ReadItem]:
    """What `items`, all of one destination chunk, contribute to the part of it at `offsets`, read by `source`."""
    found = []
    for item in items:
        low = tuple(map(max, item.dest_offsets, offsets))
        ends = zip(item.dest_offsets, item.lengths, offsets, sizes, strict=True)
        lengths = tuple(min(a + an, b + bn) - at for (a, an, b, bn), at in zip(ends, low, strict=True))
        if all(length > 0 for length in lengths):
            begins = zip(item.storage_offsets, low, item.dest_offsets, strict=True)
            moved = tuple(s + at - a for s, at, a in begins)
            found.append(ReadItem(item.dest_index, item.storage_row, low, moved, lengths, item.kind, source))
    return found
