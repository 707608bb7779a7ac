"""Where a conversion reads from and writes to: places told apart, sources recognised, the wrong kind explained."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from hpdcp._base import config
from hpdcp._base.backend import Backend
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    KeyNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from hpdcp._comm.exchange import Exchange
from hpdcp._engine.load import find_metadata
from hpdcp._files import registry
from hpdcp._files.huggingface_folder import INDEX, WEIGHTS
from hpdcp._files.huggingface_names import ORIGIN, NameMapping
from hpdcp._files.huggingface_reader import HuggingFaceReader
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.file_names import is_metadata_key
from hpdcp._format.metadata import Metadata

Options: TypeAlias = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Access:
    """How a place is opened."""

    backend: str | None = None
    """A name that goes before the configuration's."""
    options: Options = None
    """For fsspec, untouched."""


_FILES: Final = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
"""Ends of names of single files of weights."""


def two_places(src: str | Path, dst: str | Path) -> tuple[str, str]:
    """Both as `registry.resolve_checkpoint_id` gives them.

    Raises:
        InvalidArgumentError: they are one and the same.
    """
    source, target = registry.resolve_checkpoint_id(src), registry.resolve_checkpoint_id(dst)
    if _real(source) == _real(target):
        raise InvalidArgumentError(f"src and dst are both {source}: convert into another place.")
    return source, target


def _real(place: str) -> str:
    return os.path.realpath(place) if is_local(place) else place.rstrip("/")


def is_local(place: str) -> bool:
    """Whether it is a path of this host, a mounted file system included."""
    return "://" not in place


def parent_of(file: str) -> tuple[str, str]:
    """The folder and the name of a file."""
    folder, _, name = file.rstrip("/").rpartition("/")
    return folder or "/", name


def open_place(place: str, access: Access) -> Backend:
    """The byte store for a place."""
    return registry.open_backend(place, name=access.backend, storage_options=access.options)


def holds_checkpoint(place: str, access: Access) -> bool:
    """Whether a checkpoint is there, which a new one replaces: of ranks that saved together, or each for itself."""
    return any(map(is_metadata_key, _keys_at(place, access)))


def holds_weights(place: str, access: Access) -> bool:
    """Whether Hugging Face weights are there, which an export replaces."""
    return not {WEIGHTS, INDEX}.isdisjoint(_keys_at(place, access))


def holds_file(place: str, access: Access) -> bool:
    """Whether the place is a file, which a new one replaces."""
    if is_local(place):
        return os.path.isfile(place)
    folder, name = parent_of(place)
    with closing(open_place(folder, access)) as backend:
        try:
            backend.size(name)
        except KeyNotFoundError:
            return False
    return True


def _keys_at(place: str, access: Access) -> list[str]:
    with closing(open_place(place, access)) as backend:
        try:
            return [info.key for info in backend.list_keys()]
        except CheckpointNotFoundError:
            return []


def require_file_name(given: str | Path, place: str) -> None:
    """Raise unless a file may be written under that name; `place` is what `two_places` makes of it.

    Raises:
        InvalidArgumentError: it is a folder, or written as one, or the root of a store.
    """
    root = not is_local(place) and "/" not in place.partition("://")[2]
    if root or os.fspath(given).endswith("/") or (is_local(place) and os.path.isdir(place)):
        raise InvalidArgumentError(
            f"{place} is a folder; expected the name of the file to write, such as {place.rstrip('/')}/checkpoint.pt."
        )


def verify_setting() -> str:
    """Which checksums a conversion compares: all, unless the configuration says none."""
    return "never" if config.current().verify == "never" else "always"


def metadata_of(reader: FileSystemReader, exchange: Exchange) -> Metadata:
    """What the source holds, on every rank; where ranks saved each for itself, theirs as one."""
    metadata, apart = find_metadata(lambda: reader, exchange)
    if metadata is not None:
        return metadata
    assert apart is not None
    return exchange.agree("joining the ranks' metadata", apart.merged)


def require_checkpoint(metadata: Metadata, source: str) -> None:
    """Raise unless hpdcp saved it.

    Raises:
        InvalidArgumentError: it is a Hugging Face folder.
    """
    if metadata.origin == ORIGIN:
        raise InvalidArgumentError(
            f"{source} is a folder of Hugging Face weights, not a checkpoint; convert_full_checkpoint_to_dcp makes one "
            "of it, and hpdcp.load reads it as it is."
        )


class FolderReader(HuggingFaceReader):
    """Reads a Hugging Face folder, or one safetensors file, that is converted; says what else a place may be."""

    def __init__(
        self, place: str, prefix: str, name_map: NameMapping | None, access: Access, *, file: str | None
    ) -> None:
        super().__init__(
            place, prefix=prefix, name_map=name_map, file=file, backend=access.backend, storage_options=access.options
        )
        self._place = place
        self._access = access

    def load_metadata(self) -> Metadata:
        try:
            return super().load_metadata()
        except (CheckpointNotFoundError, UnsupportedFormatError, StorageError) as error:
            if file_at(self._place, self._access) is not None:
                raise InvalidArgumentError(
                    f"{self._place} is a file; expected a folder of weights: src_platform='torch' converts a single "
                    "file."
                ) from error
            advice = self._advice()
            if not advice:
                raise
            raise type(error)(f"{error} {advice}") from error

    def _advice(self) -> str:
        try:
            keys = [info.key for info in self.backend.list_keys()]
        except StorageError:
            return ""
        if any(map(is_metadata_key, keys)):
            return "It is a checkpoint of hpdcp already: load it, or convert_dcp_to_huggingface makes a folder of it."
        single = [key for key in keys if key.endswith(_FILES)]
        return f"src_platform='torch' converts a single file, such as {self._place}/{single[0]}." if single else ""


def file_at(place: str, access: Access) -> str | None:
    """The name of the file that the place is; None where there is no such file."""
    if is_local(place):
        return os.path.basename(place) if os.path.isfile(place) else None
    return parent_of(place)[1] if place.endswith(_FILES) and holds_file(place, access) else None


def the_file(place: str, access: Access) -> str:
    """The name of the file that the place is.

    Raises:
        InvalidArgumentError: it is a folder, and what to do about it.
        CheckpointNotFoundError: there is nothing.
    """
    found = file_at(place, access)
    if found is not None:
        return found
    with closing(open_place(place, access)) as backend:
        keys = [info.key for info in backend.list_keys()]
    if not keys:
        raise CheckpointNotFoundError(f"{place} is no file: src_platform='torch' converts one. Is the path right?")
    single = [key for key in keys if key.endswith(_FILES)]
    if WEIGHTS in keys or INDEX in keys:
        advice = "It is a Hugging Face folder: src_platform='huggingface' converts it."
    elif any(map(is_metadata_key, keys)):
        advice = "It is a checkpoint of hpdcp already."
    else:
        advice = f"Give the file itself, such as {place}/{single[0]}." if single else "Give the file itself."
    raise InvalidArgumentError(f"{place} is a folder; src_platform='torch' converts one file. {advice}")
