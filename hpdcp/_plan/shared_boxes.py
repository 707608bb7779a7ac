"""Boxes of destination chunks that one rank, the reader rank, reads for all that want them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hpdcp._format.columns import I64, ChunkTable, Columns, column, strings_from, strings_to
from hpdcp._format.metadata import MetadataIndex
from hpdcp._format.strings import StringColumn

Group: TypeAlias = tuple[int, ...]
"""Ranks that share what they read, ascending."""

DIRECT: Final = 1
ON_DEVICE: Final = 2


@dataclass(frozen=True, slots=True)
class BroadcastInfo:
    """How one destination chunk reaches the ranks that want it."""

    group: Group
    """Ranks that want the identical chunk."""
    reader_rank: int
    """The rank that reads it for all of them."""
    transport_dtype: str
    """torch's name of the dtype on the wire: the stored one, or "uint8" where the process group cannot send it."""
    direct: bool
    """Whether every member receives straight into its target; False: through staging."""
    on_device: bool = False
    """Whether it goes from device to device, in a process group that carries their tensors; False: over hosts."""

    @property
    def source(self) -> int:
        """The earlier name of `reader_rank`."""
        return self.reader_rank


@dataclass(frozen=True, slots=True)
class SharedBox:
    """A box of a destination chunk that one rank reads for all that want it."""

    index: MetadataIndex
    """The destination chunk, the same on all of them."""
    offsets: tuple[int, ...]
    """Where the box starts in the chunk."""
    sizes: tuple[int, ...]
    stored_dtype: str
    """torch's name of the dtype of the bytes that are read and sent."""
    info: BroadcastInfo


@dataclass(frozen=True, slots=True)
class SharedColumns:
    """Shared boxes, row by row, in the order in which every rank walks them."""

    boxes: ChunkTable
    """`entry` is a row of the plan's targets; offsets are in the destination chunk."""
    group: I64
    """Row of `groups`."""
    reader_rank: I64
    stored_dtype: npt.NDArray[np.int32]
    """Row of `dtype_names`."""
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
    def groups(self) -> list[Group]:
        """The groups' ranks, in order."""
        bounds = [0, *self.group_ends.tolist()]
        ranks = self.group_ranks.tolist()
        return [tuple(ranks[a:b]) for a, b in itertools.pairwise(bounds)]

    def as_boxes(self, indexes: Sequence[MetadataIndex]) -> tuple[SharedBox, ...]:
        """One object for each row; `indexes` are the destination chunks of the plan's targets."""
        groups, names = self.groups, list(self.dtype_names)
        infos: dict[tuple[int, int, int, int], BroadcastInfo] = {}
        found = []
        for target, (offsets, sizes), stored, *how in zip(
            self.boxes.entry.tolist(),
            offsets_and_sizes(self.boxes),
            self.stored_dtype.tolist(),
            self.group.tolist(),
            self.reader_rank.tolist(),
            self.transport_dtype.tolist(),
            self.direct.tolist(),
            strict=True,
        ):
            group, reader_rank, transport, direct = key = (how[0], how[1], how[2], how[3])
            info = infos.get(key)
            if info is None:
                info = infos[key] = BroadcastInfo(
                    groups[group], reader_rank, names[transport], bool(direct & DIRECT), bool(direct & ON_DEVICE)
                )
            found.append(SharedBox(indexes[target], offsets, sizes, names[stored], info))
        return tuple(found)

    def to_columns(self) -> dict[str, npt.NDArray[np.generic]]:
        """Named arrays, from which `from_columns` makes them again."""
        columns: dict[str, npt.NDArray[np.generic]] = {
            **self.boxes.to_columns("shared."),
            "shared.group": self.group,
            "shared.reader_rank": self.reader_rank,
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
            column(columns, "shared.reader_rank", np.int64),
            column(columns, "shared.stored_dtype", np.int32),
            column(columns, "shared.transport_dtype", np.int32),
            column(columns, "shared.direct", np.uint8),
            strings_from(columns, "shared.dtype_name"),
            column(columns, "group.ends", np.int64),
            column(columns, "group.ranks", np.int64),
        )


def offsets_and_sizes(table: ChunkTable) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of every row."""
    offsets, sizes = table.offsets.tolist(), table.sizes.tolist()
    bounds = itertools.pairwise([0, *table.ends.tolist()])
    return [(tuple(offsets[a:b]), tuple(sizes[a:b])) for a, b in bounds]
