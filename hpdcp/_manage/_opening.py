"""Opening the checkpoint that a question is about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointNotFoundError, IncompleteCheckpointError
from hpdcp._files.reader import FileSystemReader
from hpdcp._files.safetensors_layout import read_header
from hpdcp._format.container import parse_header
from hpdcp._format.file_names import METADATA, rank_metadata_key
from hpdcp._format.metadata import Metadata


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
        yield opened.backend, _find(opened)
    finally:
        opened.close()


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
