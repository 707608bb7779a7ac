"""Which checkpoint is meant by a location that holds none: those in folders right below, or under names like it."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from typing import Final

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointNotFoundError, StorageError
from hpdcp._base.natural_order import natural_key
from hpdcp._files.huggingface_folder import INDEX, WEIGHTS
from hpdcp._files.registry import foreign_layout
from hpdcp._format.file_names import METADATA, rank_metadata_key

_MOST_LOOKED_AT: Final = 50
"""Folders that are listed to say which of them is meant: each is a request."""
_MOST_NAMED: Final = 5


@contextlib.contextmanager
def nearby_named(backend: Backend) -> Iterator[None]:
    """A context in which an error that no checkpoint is there says which one may be meant."""
    try:
        yield
    except CheckpointNotFoundError as error:
        explained = _explained(backend, error)
        if explained is None:
            raise
        raise explained from error


def _explained(backend: Backend, error: CheckpointNotFoundError) -> CheckpointNotFoundError | None:
    """The error with what to do next: which folder is meant; None: it says enough."""
    url = backend.url
    is_local = "://" not in url
    if is_local and os.path.isfile(url):
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
