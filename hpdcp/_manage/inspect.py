"""What a checkpoint holds, from its metadata alone: the data behind `hpdcp inspect`; prints nothing.

Any checkpoint hpdcp wrote will do, also one that ranks saved each for itself, and any Hugging Face weights in
safetensors files; nothing of what is in them is run.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointNotFoundError, IncompleteCheckpointError, StorageError
from hpdcp._files.huggingface_folder import INDEX, WEIGHTS
from hpdcp._files.reader import FileSystemReader
from hpdcp._files.registry import foreign_layout
from hpdcp._files.safetensors_layout import read_header
from hpdcp._format.columns import I64, EntryKind
from hpdcp._format.container import parse_header
from hpdcp._format.file_names import METADATA, rank_metadata_key
from hpdcp._format.metadata import Metadata

_MOST_LOOKED_AT: Final = 50
"""Folders that are listed to say which of them is meant: each is a request."""
_MOST_NAMED: Final = 5
_NUMBER: Final = re.compile("[0-9]+")


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
    checkpoint_id: str | Path, *, pattern: str | None = None, reader: FileSystemReader | None = None
) -> CheckpointReport:
    """What the checkpoint holds, from its metadata alone; of data files at most the headers are read.

    Args:
        checkpoint_id: folder or URL.
        pattern: only names that match it, as a shell matches files (`model.*.weight`); None: all.
        reader: in place of the configured one.

    Raises:
        CheckpointError, StorageError: there is no whole checkpoint, or it cannot be read.
    """
    with open_checkpoint(checkpoint_id, reader) as (backend, found):
        return _report(backend.url, found, pattern)


@dataclass(frozen=True, slots=True)
class FoundMetadata:
    """A checkpoint's metadata, and how it was stored."""

    metadata: Metadata
    version: str
    by_rank: bool
    nbytes: int
    """Of the metadata files together; 0 where a data file's own header is all there is."""


@contextlib.contextmanager
def open_checkpoint(
    checkpoint_id: str | Path, reader: FileSystemReader | None
) -> Iterator[tuple[Backend, FoundMetadata]]:
    """The byte store and the metadata of a checkpoint, all ranks' as one where each saved for itself."""
    opened = reader or FileSystemReader()
    opened.initialize_reader(checkpoint_id)
    try:
        try:
            found = _find(opened)
        except (CheckpointNotFoundError, StorageError) as error:
            explained = _explained(opened.backend, error)
            if explained is None:
                raise
            raise explained from error
        yield opened.backend, found
    finally:
        opened.close()


def _explained(backend: Backend, error: Exception) -> CheckpointNotFoundError | None:
    """The error with what to do next: which folder is meant, or that the place is a file; None: it says enough."""
    url = backend.url
    local = "://" not in url
    if local and os.path.isfile(url):
        return CheckpointNotFoundError(
            f"{url} is a file, and a checkpoint is a folder: give the folder. Of one file of weights "
            "src_platform='torch' makes a checkpoint."
        )
    if not isinstance(error, CheckpointNotFoundError):
        return None
    if local and not os.path.isdir(url):
        return CheckpointNotFoundError(f"{error} {_nearest(url)}")
    with contextlib.suppress(StorageError):
        below = _checkpoints_below(backend)
        if below:
            return CheckpointNotFoundError(
                f"{url} holds no checkpoint itself, but folders of it do: {', '.join(map(repr, below))}. Give one of "
                f"them, such as {url.rstrip('/')}/{below[-1]}."
            )
    return None


def _nearest(path: str) -> str:
    """What there is in place of a path that is not there."""
    folder = os.path.dirname(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    near: list[str] = []
    if folder == os.path.dirname(path):
        with contextlib.suppress(OSError):
            near = difflib.get_close_matches(os.path.basename(path), os.listdir(folder), n=3)
    if near:
        return f"Did you mean {' or '.join(os.path.join(folder, name) for name in near)}?"
    return f"Is the path right? {folder} is there."


def _checkpoints_below(backend: Backend) -> list[str]:
    """Folders right below that hold a checkpoint or weights, the last few by name, numbers by their value."""
    found: list[str] = []
    for folder in sorted(backend.list_folders(), key=_numbers_by_value, reverse=True)[:_MOST_LOOKED_AT]:
        names = {info.key.removeprefix(f"{folder}/") for info in backend.list_keys(folder)}
        marks = (METADATA, rank_metadata_key(0), WEIGHTS, INDEX)
        if not names.isdisjoint(marks) or foreign_layout(names) is not None:
            found.append(folder)
            if len(found) == _MOST_NAMED:
                break
    return found[::-1]


def _numbers_by_value(name: str) -> str:
    return _NUMBER.sub(lambda found: found[0].zfill(20), name)


def _find(reader: FileSystemReader) -> FoundMetadata:
    try:
        metadata, keys = reader.load_metadata(), [METADATA]
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        apart = reader.load_rank_metadata(0)
        if apart is None:
            raise
        metadata = apart.merged()
        keys = [rank_metadata_key(rank) for rank in range(metadata.world_size)]
    backend = reader.backend
    if metadata.origin:
        listing = metadata.settings["listed_in"]
        return FoundMetadata(metadata, "", False, 0 if listing in metadata.files else backend.size(listing))
    sizes = [backend.size(key) for key in keys]
    where = f"{backend.url}/{keys[0]}"
    header = parse_header(read_header(backend, keys[0], sizes[0]), sizes[0], where=where)
    return FoundMetadata(metadata, header.metadata.get("version", ""), keys != [METADATA], sum(sizes))


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
    for row, fqn in enumerate(metadata.entries.fqns):
        if pattern is not None and not fnmatch.fnmatchcase(fqn, pattern):
            continue
        entry = metadata.entries[row]
        within = pairs[owners[row] : owners[row + 1]] % max(1, len(file_names))
        yield EntryReport(
            fqn=fqn,
            kind=entry.kind,
            dtype=entry.dtype,
            shape=entry.shape,
            owner=entry.owner,
            alias_of=entry.target,
            chunks=int(chunks[row]),
            files=tuple(file_names[file] for file in within.tolist()),
            nbytes=int(nbytes[row]),
        )
