"""One file of `torch.save` made of a whole checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpdcp._base import progress
from hpdcp._base.arguments import require_flags
from hpdcp._comm.exchange import Alone
from hpdcp._convert._full_state import full_state
from hpdcp._convert._location import Location, Options, verify_setting
from hpdcp._convert._sources import checkpoint_metadata
from hpdcp._convert._torch_file import ScratchMemory, save_torch_file, upload
from hpdcp._convert.conversion import Conversion, ConversionOptions, tensor_sizes
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.metadata import Metadata


@dataclass(frozen=True, kw_only=True)
class _TorchFileOptions(ConversionOptions):
    """What `convert_dcp_to_torch` is told."""

    allow_pickle: bool | None


def convert_dcp_to_torch(
    src: str | Path,
    dst: str | Path,
    *,
    src_storage_options: Options = None,
    dst_storage_options: Options = None,
    src_backend: str | None = None,
    dst_backend: str | None = None,
    allow_pickle: bool | None = None,
    dry_run: bool = False,
) -> Conversion:
    """Make one file of `torch.save` of a whole checkpoint, nesting and Python values and all, in this process alone.

    Tensors that cannot be mapped, or lie in parts, go by way of a temporary file beside the destination.

    Args:
        src: the checkpoint.
        dst: the file, replaced in one step. Any URL; a remote one is written to a temporary file first.
        allow_pickle: whether Python values of the checkpoint may be unpickled; None: as configured.
        src_storage_options, dst_storage_options, src_backend, dst_backend, dry_run: as in
            `convert_full_checkpoint_to_dcp`.

    Raises:
        InvalidArgumentError: the destination is a folder.
        CheckpointError, StorageError, UnsafePickleError: the destination is as it was.
    """
    require_flags(dry_run=dry_run)
    options = _TorchFileOptions(
        source=Location.of(src, src_backend, src_storage_options),
        destination=Location.of(dst, dst_backend, dst_storage_options),
        allow_pickle=allow_pickle,
        dry_run=dry_run,
        no_dist=True,
    )
    options.destination.require_file_name(dst)
    with closing(
        options.source.checkpoint_reader(allow_pickle=options.allow_pickle, verify=verify_setting())
    ) as reader:
        metadata = checkpoint_metadata(reader, Alone())
        sizes = tensor_sizes(metadata)
        replaced = options.destination.holds_file()
        files: dict[str, int] = {}
        if not options.dry_run:
            size = _write(reader, metadata, sizes, options.destination)
            files = {options.destination.url: size}
        return options.result(sizes, files, replaced=replaced)


def _write(reader: FileSystemReader, metadata: Metadata, sizes: Mapping[str, int], destination: Location) -> int:
    """Write the file; how many bytes it has."""
    folder = destination.parent
    if destination.is_local:
        os.makedirs(folder.url, exist_ok=True)
    scratch = ScratchMemory.for_tensors(sizes.values(), folder.url if destination.is_local else None)
    value = full_state(reader, metadata, allocate=scratch.allocate, check_all=True)
    total = sum(sizes.values())
    if destination.is_local:
        return _write_local(value, total, destination.url)
    with closing(folder.open()) as backend, tempfile.TemporaryDirectory() as spool:
        path = os.path.join(spool, "file")
        size = _write_local(value, total, path)
        backend.prepare()
        with progress.bar("upload", size):
            upload(path, progress.counted(backend), destination.name)
        return size


def _write_local(value: Any, total: int, path: str) -> int:
    with progress.bar("convert", total) as shown:
        return save_torch_file(value, path, shown.add)
