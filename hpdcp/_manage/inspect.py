"""What a checkpoint holds, from its metadata alone: the data behind `hpdcp inspect`; prints nothing.

Any checkpoint hpdcp wrote will do, also one that ranks saved each for itself, and any Hugging Face weights in
safetensors files; nothing of what is in them is run.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpdcp._format.columns import I64, EntryKind, starts_of
from hpdcp._format.metadata import Metadata
from hpdcp._manage._opening import FoundMetadata, open_checkpoint

if TYPE_CHECKING:
    from hpdcp._files.reader import FileSystemReader


@dataclass(frozen=True, slots=True)
class EntryReport:
    """One name of a checkpoint; state under `PerRank` has one for each rank."""

    fqn: str
    kind: EntryKind
    dtype: str
    """torch's name; empty for a Python value."""
    shape: tuple[int, ...]
    """The global shape; empty for a Python value."""
    owner: int | None
    """The rank, for state under `PerRank`."""
    alias_of: str
    """The name that stores the bytes, for a tied tensor; else empty."""
    chunks: int
    files: tuple[str, ...]
    nbytes: int
    """Stored for it: its own chunks'; 0 for a tied name."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """One data file of a checkpoint."""

    key: str
    size: int
    """In bytes, as recorded."""
    chunks: int
    """Of tensors, and Python values, that lie in it."""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What a checkpoint holds."""

    url: str
    origin: str
    """Who wrote the files, such as "huggingface"; empty: hpdcp."""
    version: str
    """Of hpdcp's format, such as "1.0"; empty for files of another origin."""
    layout: str
    world_size: int
    attempt: str
    run: str
    """Of ranks that saved each for itself; else empty."""
    by_rank: bool
    """Whether each rank saved for itself, under `{rank}.metadata`."""
    metadata_bytes: int
    entries: tuple[EntryReport, ...]
    """Sorted by name, then rank; those that match, where a pattern was given."""
    files: tuple[FileReport, ...]
    """Every one, whatever the pattern."""

    @property
    def tensors(self) -> list[EntryReport]:
        """Tensors that all ranks share, tied names left out."""
        return [entry for entry in self.entries if entry.kind is EntryKind.TENSOR and entry.owner is None]

    @property
    def values(self) -> list[EntryReport]:
        """Python values that all ranks share."""
        return [entry for entry in self.entries if entry.kind is EntryKind.OBJECT and entry.owner is None]

    @property
    def aliases(self) -> list[EntryReport]:
        """Names that are tied to another one."""
        return [entry for entry in self.entries if entry.kind is EntryKind.ALIAS]

    @property
    def per_rank(self) -> list[EntryReport]:
        """Everything under `PerRank`, rank by rank."""
        return [entry for entry in self.entries if entry.owner is not None and entry.kind is not EntryKind.ALIAS]

    @property
    def nbytes(self) -> int:
        """Stored bytes of `entries`."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def file_bytes(self) -> int:
        """Size of all data files together."""
        return sum(file.size for file in self.files)


def inspect_checkpoint(
    checkpoint_id: str | Path,
    *,
    pattern: str | None = None,
    reader: FileSystemReader | None = None,
    backend: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointReport:
    """What the checkpoint holds, from its metadata alone; of data files at most the headers are read.

    Args:
        checkpoint_id: folder or URL.
        pattern: only names that match it, as a shell matches files (`model.*.weight`); None: all.
        reader: in place of the configured one.
        backend, storage_options: where no reader is given, as `FileSystemReader` takes them.

    Raises:
        CheckpointError, StorageError: there is no whole checkpoint, or it cannot be read.
    """
    with open_checkpoint(checkpoint_id, reader, backend=backend, storage_options=storage_options) as (store, found):
        return _report(store.url, found, pattern)


def _report(url: str, found: FoundMetadata, pattern: str | None) -> CheckpointReport:
    metadata, settings = found.metadata, found.metadata.settings
    names = list(metadata.storage.file_names)
    return CheckpointReport(
        url=url,
        origin=metadata.origin,
        version=found.version,
        layout=settings.get("layout", ""),
        world_size=metadata.world_size,
        attempt=settings.get("attempt", ""),
        run=settings.get("run", "") if found.by_rank else "",
        by_rank=found.by_rank,
        metadata_bytes=found.nbytes,
        entries=tuple(_entries(metadata, names, pattern)),
        files=tuple(
            FileReport(name, size, chunks)
            for name, size, chunks in zip(
                names,
                metadata.storage.file_sizes.tolist(),
                np.bincount(metadata.storage.file, minlength=len(names)).tolist(),
                strict=True,
            )
        ),
    )


def _entries(metadata: Metadata, file_names: Sequence[str], pattern: str | None) -> Iterator[EntryReport]:
    chunks = np.bincount(metadata.chunks.entry, minlength=len(metadata.entries))
    nbytes: I64 = np.zeros(len(metadata.entries), dtype=np.int64)
    np.add.at(nbytes, metadata.chunks.entry, metadata.storage.length)
    # Each pair of entry and file once, in the order of entries.
    pairs = np.unique(metadata.chunks.entry * max(1, len(file_names)) + metadata.storage.file)
    owners = np.searchsorted(pairs // max(1, len(file_names)), np.arange(len(metadata.entries) + 1))
    entries, starts = metadata.entries, starts_of(metadata.entries.shape_ends).tolist()
    dims, dtype_names, kinds = entries.shape_dims.tolist(), list(entries.dtype_names), list(EntryKind)
    files, within = (pairs % max(1, len(file_names))).tolist(), owners.tolist()
    rows = zip(
        entries.fqns,
        entries.kinds.tolist(),
        entries.dtype_codes.tolist(),
        zip(starts, entries.shape_ends.tolist(), strict=True),
        entries.owners.tolist(),
        entries.targets,
        chunks.tolist(),
        itertools.pairwise(within),
        nbytes.tolist(),
        strict=True,
    )
    for fqn, kind, dtype, (start, stop), owner, target, count, (first, last), stored in rows:
        if pattern is not None and not fnmatch.fnmatchcase(fqn, pattern):
            continue
        yield EntryReport(
            fqn=fqn,
            kind=kinds[kind],
            dtype=dtype_names[dtype],
            shape=tuple(dims[start:stop]),
            owner=None if owner < 0 else owner,
            alias_of=target,
            chunks=count,
            files=tuple(file_names[file] for file in files[first:last]),
            nbytes=stored,
        )
