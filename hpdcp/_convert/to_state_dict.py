"""Whole state dicts made of checkpoints and of Hugging Face folders."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._comm.exchange import Alone
from hpdcp._convert._full_state import full_state
from hpdcp._convert._location import Location, Options
from hpdcp._convert._sources import WeightsReader, checkpoint_metadata, metadata_of
from hpdcp._format.metadata import Metadata


def dcp_to_full_state_dict(
    src: str | Path,
    *,
    include: Sequence[str] = (),
    src_storage_options: Options = None,
    allow_pickle: bool | None = None,
) -> dict[Any, Any]:
    """The whole of a checkpoint as one state dict on the CPU, nesting and Python values as they were saved.

    Where the store can map files, tensors are private maps of them: bytes are read when touched, and what is changed
    is copied then, page by page, so that the tensors may be trained on and the files stay as they are. Tied tensors are
    one tensor. What each rank kept for itself is a list, rank by rank. Keys of a dict come sorted by name.

    Args:
        include: only names that match one of these patterns, as a shell matches files; none: all. Nothing else is read.

    Raises:
        InvalidArgumentError: a pattern that no name matches.
        CheckpointError, StorageError, UnsafePickleError: naming the key.
    """
    source = Location.of(src, storage_options=src_storage_options)
    with closing(source.checkpoint_reader(allow_pickle=allow_pickle)) as reader:
        metadata = checkpoint_metadata(reader, Alone())
        return full_state(reader, metadata, rows=_matching(metadata, include) if include else None)


def _matching(metadata: Metadata, include: Sequence[str]) -> list[int]:
    names = list(metadata.entries.fqns)
    for pattern in include:
        if not fnmatch.filter(names, pattern):
            raise InvalidArgumentError(f"no name in the checkpoint matches {pattern!r} of include.")
    return [row for row, name in enumerate(names) if any(fnmatch.fnmatchcase(name, pattern) for pattern in include)]


def parse_checkpoint_from_huggingface(
    src: str | Path, *, src_storage_options: Options = None
) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face folder by name, on the CPU; mapped as `dcp_to_full_state_dict` maps.

    Raises:
        CheckpointError, StorageError: a folder that is damaged, incomplete or something else; names file and key.
    """
    with closing(WeightsReader(Location.of(src, storage_options=src_storage_options))) as reader:
        return full_state(reader, metadata_of(reader, Alone()))
