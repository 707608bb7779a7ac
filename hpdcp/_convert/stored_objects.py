"""Python values as a checkpoint stores them: encoded, so that reading them runs no code of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hpdcp._files.reader import FileSystemReader
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan.load_plan import LoadPlan, ReadItem


def object_rows(metadata: Metadata) -> list[int]:
    """The entries that are Python values, each rank's own among them."""
    return [int(row) for row in np.flatnonzero(metadata.entries.kinds == EntryKind.OBJECT)]


def read_objects(reader: FileSystemReader, metadata: Metadata, rows: Sequence[int]) -> dict[int, bytes]:
    """Row → stored bytes of these Python values; `objects.decode` makes values of them.

    Raises:
        CorruptCheckpointError, StorageError: naming the file.
    """
    if not rows:
        return {}
    entries = metadata.entries
    row_of: dict[MetadataIndex, int] = {}
    for row in rows:
        owner = int(entries.owners[row])
        row_of[MetadataIndex(entries.fqns[row], owner=None if owner < 0 else owner)] = row
    items = [
        ReadItem(index, metadata.chunk_rows(row)[0], (), (), (), EntryKind.OBJECT) for index, row in row_of.items()
    ]
    targets = _ObjectTargets()
    reader.execute_read(reader.optimize_local_plan(LoadPlan.build(items)), targets)
    return {row_of[index]: data for index, data in targets.found.items()}


class _ObjectTargets:
    """Keeps the bytes of Python values."""

    def __init__(self) -> None:
        self.found: dict[MetadataIndex, bytes] = {}

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        raise AssertionError(f"{item.dest_index} is a Python value")

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        raise AssertionError(f"{item.dest_index} is a Python value")

    def apply_bytes(self, item: ReadItem, data: bytes) -> None:
        self.found[item.dest_index] = data
