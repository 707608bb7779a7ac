"""What a conversion may read: a checkpoint, a folder of weights, or one file; the wrong kind is explained."""

from __future__ import annotations

from contextlib import closing

from hpdcp._base.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    StorageError,
    UnsupportedFormatError,
)
from hpdcp._comm.exchange import Exchange
from hpdcp._convert._location import FILE_ENDINGS, Location, has_checkpoint, has_weights
from hpdcp._engine.load import find_metadata
from hpdcp._files import torch_folder
from hpdcp._files.huggingface_names import ORIGIN, NameMapping
from hpdcp._files.huggingface_reader import HuggingFaceReader
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.metadata import Metadata
from hpdcp._state.scales import separated_codes


def metadata_of(reader: FileSystemReader, exchange: Exchange) -> Metadata:
    """What the source holds, on every rank; where ranks saved each for itself, theirs as one."""
    metadata, apart = find_metadata(lambda: reader, exchange)
    if metadata is not None:
        return metadata
    assert apart is not None
    return exchange.agree("joining the ranks' metadata", apart.merged)


def checkpoint_metadata(reader: FileSystemReader, exchange: Exchange) -> Metadata:
    """As `metadata_of`, of a checkpoint that hpdcp saved.

    Raises:
        InvalidArgumentError: the source is a Hugging Face folder.
    """
    metadata = metadata_of(reader, exchange)
    if metadata.origin == ORIGIN:
        raise InvalidArgumentError(
            f"{reader.backend.url} is a folder of Hugging Face weights, not a checkpoint; "
            "convert_full_checkpoint_to_dcp makes one of it, and hpdcp.load reads it as it is."
        )
    return metadata


class WeightsReader(HuggingFaceReader):
    """Reads a Hugging Face folder, or one safetensors file of it, to be converted; says what else lies there."""

    def __init__(
        self, folder: Location, *, prefix: str = "", name_map: NameMapping | None = None, file: str | None = None
    ) -> None:
        super().__init__(
            folder.url,
            prefix=prefix,
            name_map=name_map,
            file=file,
            backend=folder.backend,
            storage_options=folder.storage_options,
        )
        self._folder = folder

    def load_metadata(self) -> Metadata:
        metadata = self._checked_metadata()
        apart = separated_codes(metadata.settings)
        if apart:
            name, scale = next(iter(apart.items()))
            raise InvalidArgumentError(
                f"name_map leaves {len(apart)} quantised tensors without their scales, such as {name!r}, which is "
                f"scaled by {scale!r} in {self._folder}: nothing in the checkpoint would tell that they hold codes. "
                "Name each scale as its codes and the same ending, or leave out both."
            )
        return metadata

    def _checked_metadata(self) -> Metadata:
        try:
            return super().load_metadata()
        except (CheckpointNotFoundError, UnsupportedFormatError, StorageError) as error:
            if self._folder.is_weights_file():
                raise InvalidArgumentError(
                    f"{self._folder} is a file; expected a folder of weights: src_platform='torch' converts a single "
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
        if torch_folder.holds_checkpoint(self.backend, keys):
            return "It is a checkpoint of torch.distributed.checkpoint: src_platform='torch' makes one of hpdcp of it."
        if has_checkpoint(keys):
            return "It is a checkpoint of hpdcp already: load it, or convert_dcp_to_huggingface makes a folder of it."
        single = [key for key in keys if key.endswith(FILE_ENDINGS)]
        return f"src_platform='torch' converts a single file, such as {self._folder}/{single[0]}." if single else ""


def is_torch_folder(source: Location) -> bool:
    """Whether the source is a folder that torch.distributed.checkpoint saved to, and no single file."""
    if source.is_weights_file():
        return False
    with closing(source.open()) as backend:
        try:
            return torch_folder.holds_checkpoint(backend, [info.key for info in backend.list_keys()])
        except CheckpointNotFoundError:
            return False


def require_weights_file(file: Location) -> None:
    """Raise unless a file of weights is there.

    Raises:
        InvalidArgumentError: it is a folder, and what to do about it.
        CheckpointNotFoundError: there is nothing.
    """
    if file.is_weights_file():
        return
    with closing(file.open()) as backend:
        keys = [info.key for info in backend.list_keys()]
    if not keys:
        raise CheckpointNotFoundError(f"{file} is no file: src_platform='torch' converts one. Is the path right?")
    single = [key for key in keys if key.endswith(FILE_ENDINGS)]
    if has_weights(keys):
        advice = "It is a Hugging Face folder: src_platform='huggingface' converts it."
    elif has_checkpoint(keys):
        advice = "It is a checkpoint of hpdcp already: convert_dcp_to_dcp writes it again."
    else:
        advice = f"Give the file itself, such as {file}/{single[0]}." if single else "Give the file itself."
    raise InvalidArgumentError(f"{file} is a folder; src_platform='torch' converts one file. {advice}")
