"""What a rank reads and where it goes: one item, one destination, and many of each as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpdcp._format.columns import I64, ChunkTable, EntryKind, take_runs
from hpdcp._format.metadata import MetadataIndex
from hpdcp._plan.shared_boxes import DIRECT, ON_DEVICE


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

    @property
    def flags(self) -> int:
        """`DIRECT`, `ON_DEVICE`, both or none."""
        return DIRECT * self.direct | ON_DEVICE * self.on_device


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

    def take(self, rows: npt.NDArray[np.integer]) -> ItemColumns:
        """These rows alone."""
        if len(rows) == len(self.storage_row) and np.array_equal(rows, np.arange(len(rows))):
            return self
        _, positions = take_runs(self.boxes.ends, rows)
        return ItemColumns(self.boxes.take(rows), self.storage_offsets[positions], self.storage_row[rows])
