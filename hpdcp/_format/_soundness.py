"""Whether the columns of a metadata file fit together, so that no later look-up can go astray.

Whoever wrote the file may mean harm: every number is compared with those it must fit before one is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpdcp._format._storage_table import StorageTable
from hpdcp._format.checksums import BLOCK_BYTES
from hpdcp._format.columns import I64, ChunkTable, EntryKind, EntryTable, starts_of
from hpdcp._format.strings import fits

MOST_RANKS: Final = 1 << 20
"""Ranks that a checkpoint may say it was saved by; a forged number must not decide how much memory a load takes."""


def check_columns(entries: EntryTable, chunks: ChunkTable, storage: StorageTable, *, has_checksums: bool) -> None:
    """Raise ValueError unless the tables fit one another."""
    n, m = len(entries), len(chunks)
    for name, column_, length in (
        ("entry.fqn", entries.fqns, n),
        ("entry.path", entries.paths, n),
        ("entry.target", entries.targets, n),
        ("entry.dtype", entries.dtype_codes, n),
        ("entry.owner", entries.owners, n),
        ("entry.shape", entries.shape_ends, n),
        ("entry.position", entries.positions, n),
        ("chunk.ends", chunks.ends, m),
        ("storage.file", storage.file, m),
        ("storage.offset", storage.offset, m),
        ("storage.length", storage.length, m),
        ("storage.crc", storage.crc_ends, m),
        ("file.size", storage.file_sizes, len(storage.file_names)),
        ("file.mark", storage.file_marks, len(storage.file_names)),
    ):
        if len(column_) != length:
            raise ValueError(f"column {name} has {len(column_)} rows, expected {length}")
    _check_ends("entry.shape", entries.shape_ends, len(entries.shape_dims))
    _check_ends("chunk", chunks.ends, len(chunks.offsets))
    _check_ends("storage.crc", storage.crc_ends, len(storage.crcs))
    if len(chunks.sizes) != len(chunks.offsets):
        raise ValueError("chunk.sizes and chunk.offsets differ in length")
    _check_codes("entry.dtype", entries.dtype_codes, len(entries.dtype_names))
    _check_codes("entry.kind", entries.kinds, len(EntryKind))
    _check_codes("storage.file", storage.file, len(storage.file_names))
    _check_codes("chunk.entry", chunks.entry, n)
    if bool((chunks.entry[1:] < chunks.entry[:-1]).any()):
        raise ValueError("chunk rows are not sorted by entry")
    owned = entries.ndims()[chunks.entry]
    if bool((owned != chunks.ends - starts_of(chunks.ends)).any()):
        raise ValueError("a chunk has another number of dimensions than its tensor")
    dims = entries.shape_dims
    first = starts_of(entries.shape_ends)[chunks.entry]
    within = np.arange(len(chunks.offsets), dtype=np.int64) - np.repeat(starts_of(chunks.ends), owned)
    limits = dims[np.repeat(first, owned) + within] if len(chunks.offsets) else dims[:0]
    # Differences, since a sum of two forged numbers may wrap around.
    if bool((dims < 0).any() or (chunks.offsets < 0).any() or (chunks.sizes < 0).any()) or bool(
        (chunks.offsets > limits - chunks.sizes).any()
    ):
        raise ValueError("a chunk reaches beyond its tensor")
    sizes = storage.file_sizes[storage.file] if m else storage.length
    if bool((storage.offset < 0).any() or (storage.length < 0).any() or (storage.file_sizes < 0).any()) or bool(
        (storage.offset > sizes - storage.length).any()
    ):
        raise ValueError("an extent reaches beyond its file")
    blocks = -(-storage.length // BLOCK_BYTES) * int(has_checksums)
    if bool((storage.crc_ends - starts_of(storage.crc_ends) != blocks).any()):
        raise ValueError("an extent has another number of checksums than blocks")


def check_entries(
    entries: EntryTable, chunks: ChunkTable, settings: Mapping[str, str], find: Callable[[str], int | None]
) -> None:
    """Raise ValueError unless owners, Python values and tied names are what they can be, once `check_columns` passed.

    `find` gives the row of a name that all ranks share.
    """
    ranks = _count_of("world_size", settings.get("world_size", "1"), 1, MOST_RANKS + 1)
    if "rank" in settings:
        _count_of("rank", settings["rank"], 0, ranks)
    if len(entries) and not -1 <= int(entries.owners.min()) <= int(entries.owners.max()) < ranks:
        raise ValueError(f"column entry.owner names ranks beyond the {ranks} that saved")
    stored = np.bincount(chunks.entry, minlength=len(entries))
    if bool(((entries.kinds == EntryKind.OBJECT) & ((stored == 0) | (entries.ndims() > 0))).any()):
        raise ValueError("a Python value has no bytes, or a shape")
    for row in np.flatnonzero(entries.kinds == EntryKind.ALIAS).tolist():
        name, other = entries.fqns[row], entries.targets[row]
        target = find(other)
        if target is None or entries.kinds[target] != EntryKind.TENSOR or stored[row]:
            raise ValueError(f"{name!r} is tied to {other!r}, which is no stored tensor")
        if (entries.dtype(row), entries.shape(row)) != (entries.dtype(target), entries.shape(target)):
            raise ValueError(f"{name!r} is tied to {other!r}, which is another tensor")


def _count_of(name: str, text: str, least: int, stop: int) -> int:
    """The number that the setting `name` gives; ValueError unless it lies in range(least, stop)."""
    if re.fullmatch("[0-9]{1,9}", text) is None or not least <= int(text) < stop:
        raise ValueError(f"setting {name} is {text[:40]!r}, expected a number from {least} to {stop - 1}")
    return int(text)


def _check_ends(name: str, ends: I64, total: int) -> None:
    if not fits(ends, total):
        raise ValueError(f"column {name}.ends does not add up to its values")


def _check_codes(name: str, codes: npt.NDArray[np.integer[Any]], count: int) -> None:
    if len(codes) and (int(codes.min()) < 0 or int(codes.max()) >= count):
        raise ValueError(f"column {name} points outside its table of {count}")
