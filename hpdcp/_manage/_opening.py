"""Opening the checkpoint that a question is about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpdcp._base.backend import Backend, read_or_none
from hpdcp._base.errors import CheckpointNotFoundError, IncompleteCheckpointError, StorageError
from hpdcp._base.saves_in_flight import wait_for_saves_to
from hpdcp._files import registry
from hpdcp._format.container import parse_header
from hpdcp._format.file_names import METADATA
from hpdcp._format.metadata import Metadata
from hpdcp._format.signatures import is_pickle

if TYPE_CHECKING:
    from hpdcp._files.reader import FileSystemReader


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
    checkpoint_id: str | Path,
    reader: FileSystemReader | None,
    *,
    backend: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Backend, FoundMetadata]]:
    """The byte store and the metadata of a checkpoint, all ranks' as one where each saved for itself.

    Without a `reader`, by the backend of this name and with these options. What ranks saved together is then opened
    without torch.
    """
    if reader is None:
        url = registry.resolve_checkpoint_id(checkpoint_id)
        with registry.open_backend(url, name=backend, storage_options=dict(storage_options or {})) as store:
            found = _saved_together(store)
            if found is not None:
                yield store, found
                return
        from hpdcp._files.reader import FileSystemReader

        reader = FileSystemReader(backend=backend, storage_options=storage_options)
    reader.initialize_reader(checkpoint_id)
    try:
        yield reader.backend, _find(reader)
    finally:
        reader.close()


def _saved_together(backend: Backend) -> FoundMetadata | None:
    """What ranks saved together; None where it is something else that a reader may know, or nothing that can be read.

    Raises:
        CorruptCheckpointError, UnsupportedFormatError: it is there, and damaged or of a newer version.
    """
    wait_for_saves_to(backend.url)
    try:
        data = read_or_none(backend, METADATA)
    except StorageError:
        return None  # a reader says what is there in its place
    if data is None or is_pickle(data):
        return None
    where = f"{backend.url}/{METADATA}"
    metadata = Metadata.from_bytes(data, where=where)
    version = parse_header(data, len(data), where=where).metadata.get("version", "")
    return FoundMetadata(metadata, version, False, len(data))


def _find(reader: FileSystemReader) -> FoundMetadata:
    from hpdcp._files.safetensors_layout import read_header

    try:
        metadata, keys = reader.load_metadata(), [METADATA]
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        apart = reader.load_rank_metadata(0)
        if apart is None:
            raise
        metadata = apart.merged()
        keys = list(apart.keys)
    backend = reader.backend
    if metadata.origin:
        listing = metadata.settings["listed_in"]
        return FoundMetadata(metadata, "", False, 0 if listing in metadata.files else backend.size(listing))
    sizes = [backend.size(key) for key in keys]
    where = f"{backend.url}/{keys[0]}"
    header = parse_header(read_header(backend, keys[0], sizes[0]), sizes[0], where=where)
    return FoundMetadata(metadata, header.metadata.get("version", ""), keys != [METADATA], sum(sizes))
