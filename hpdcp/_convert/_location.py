"""Where a conversion reads from or writes to, and what lies there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from hpdcp._base import config
from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointNotFoundError, InvalidArgumentError, KeyNotFoundError
from hpdcp._files import registry
from hpdcp._files.huggingface_folder import INDEX, WEIGHTS
from hpdcp._files.reader import FileSystemReader
from hpdcp._files.writer import FileSystemWriter
from hpdcp._format.file_names import is_metadata_key

Options: TypeAlias = Mapping[str, Any] | None

FILE_ENDINGS: Final = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
"""Ends of names of single files of weights."""


@dataclass(frozen=True, slots=True)
class Location:
    """A folder or a file on some store, and how the store is opened."""

    url: str
    """A path of this host or a URL, as `registry.resolve_checkpoint_id` gives it."""
    backend: str | None = None
    """A name that goes before the configuration's."""
    storage_options: Options = field(default=None, repr=False)
    """For fsspec, untouched."""

    @classmethod
    def of(cls, given: str | Path, backend: str | None = None, storage_options: Options = None) -> Location:
        """The location that a caller gave."""
        return cls(registry.resolve_checkpoint_id(given), backend, storage_options)

    def __str__(self) -> str:
        return self.url

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this host, a mounted file system included."""
        return "://" not in self.url

    @property
    def parent(self) -> Location:
        """The folder of a file."""
        return replace(self, url=self.url.rstrip("/").rpartition("/")[0] or "/")

    @property
    def name(self) -> str:
        """A file's, in its folder."""
        return self.url.rstrip("/").rpartition("/")[2]

    def is_same_as(self, other: Location) -> bool:
        """Whether both are one path or URL, links followed."""
        return self._real_url == other._real_url

    @property
    def _real_url(self) -> str:
        return os.path.realpath(self.url) if self.is_local else self.url.rstrip("/")

    def open(self) -> Backend:
        """The byte store with this folder as its root."""
        return registry.open_backend(self.url, name=self.backend, storage_options=self.storage_options)

    def checkpoint_reader(self, *, allow_pickle: bool | None = None, verify: str | None = None) -> FileSystemReader:
        """Reads the checkpoint there."""
        return FileSystemReader(
            self.url,
            backend=self.backend,
            storage_options=self.storage_options,
            allow_pickle=allow_pickle,
            verify=verify,
        )

    def checkpoint_writer(self, layout: str | None = None) -> FileSystemWriter:
        """Writes a checkpoint there."""
        return FileSystemWriter(self.url, backend=self.backend, layout=layout, storage_options=self.storage_options)

    def keys(self) -> list[str]:
        """The files of the folder; none where there is no folder."""
        with closing(self.open()) as backend:
            try:
                return [info.key for info in backend.list_keys()]
            except CheckpointNotFoundError:
                return []

    def holds_checkpoint(self) -> bool:
        """Whether a checkpoint is there, which a new one replaces."""
        return has_checkpoint(self.keys())

    def holds_weights(self) -> bool:
        """Whether Hugging Face weights are there, which an export replaces."""
        return has_weights(self.keys())

    def holds_file(self) -> bool:
        """Whether a file is there, which a new one replaces."""
        if self.is_local:
            return os.path.isfile(self.url)
        with closing(self.parent.open()) as backend:
            try:
                backend.size(self.name)
            except KeyNotFoundError:
                return False
        return True

    def is_weights_file(self) -> bool:
        """Whether a file that may hold weights is there."""
        return (self.is_local or self.url.endswith(FILE_ENDINGS)) and self.holds_file()

    def require_file_name(self, given: str | Path) -> None:
        """Raise unless a file may be written here; `given` is how the caller wrote it.

        Raises:
            InvalidArgumentError: it is a folder, or written as one, or the root of a store.
        """
        root = not self.is_local and "/" not in self.url.partition("://")[2]
        if root or os.fspath(given).endswith("/") or (self.is_local and os.path.isdir(self.url)):
            raise InvalidArgumentError(
                f"{self} is a folder; expected the name of the file to write, such as "
                f"{self.url.rstrip('/')}/checkpoint.pt."
            )


def has_checkpoint(keys: list[str]) -> bool:
    """Whether a folder of these files holds a checkpoint: of ranks that saved together, or each for itself."""
    return any(map(is_metadata_key, keys))


def has_weights(keys: list[str]) -> bool:
    """Whether a folder of these files holds Hugging Face weights."""
    return not {WEIGHTS, INDEX}.isdisjoint(keys)


def verify_setting() -> str:
    """Which checksums a conversion compares: all, unless the configuration says none."""
    return "never" if config.current().verify == "never" else "always"
