"""Python values as a checkpoint stores them: encoded, so that reading them runs no code of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hpdcp._convert.tensor_streams import FillTargets
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
    found: dict[int, bytes] = {}

    def keep(item: ReadItem, data: bytes) -> None:
        found[row_of[item.dest_index]] = data

    def no_tensor(item: ReadItem) -> torch.Tensor:
        raise AssertionError(f"{item.dest_index} is a Python value")

    plan = reader.optimize_local_plan(LoadPlan.build(items))
    reader.execute_read(plan, FillTargets(no_tensor, keep))
    return found
