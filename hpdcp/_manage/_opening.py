"""Opening the checkpoint that a question is about; a location that holds none is explained."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointNotFoundError, IncompleteCheckpointError, StorageError
from hpdcp._base.natural_order import natural_key
from hpdcp._files.huggingface_folder import INDEX, WEIGHTS
from hpdcp._files.reader import FileSystemReader
from hpdcp._files.registry import foreign_layout
from hpdcp._files.safetensors_layout import read_header
from hpdcp._format.container import parse_header
from hpdcp._format.file_names import METADATA, rank_metadata_key
from hpdcp._format.metadata import Metadata

_MOST_LOOKED_AT: Final = 50
"""Folders that are listed to say which of them is meant: each is a request."""
_MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class FoundMetadata:
    """A checkpoint's metadata, and how it was stored."""

    metadata: Metadata
    version: str
    """Of hpdcp's format; empty for files of another origin."""
    by_rank: bool
    """Whether each rank saved for itself, under `{rank}.metadata`."""
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
    """The error with what to do next: which folder is meant; None: it says enough."""
    url = backend.url
    is_local = "://" not in url
    if not isinstance(error, CheckpointNotFoundError) or (is_local and os.path.isfile(url)):
        return None
    if is_local and not os.path.isdir(url):
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
    for folder in sorted(backend.list_folders(), key=natural_key, reverse=True)[:_MOST_LOOKED_AT]:
        names = {info.key.removeprefix(f"{folder}/") for info in backend.list_keys(folder)}
        marks = (METADATA, rank_metadata_key(0), WEIGHTS, INDEX)
        if not names.isdisjoint(marks) or foreign_layout(names) is not None:
            found.append(folder)
            if len(found) == _MOST_NAMED:
                break
    return found[::-1]


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
