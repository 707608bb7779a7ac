"""Conversion between checkpoints, Hugging Face folders and files of torch, on any two stores, in bounded memory.

    convert_full_checkpoint_to_dcp            Hugging Face folder, or one file of torch → checkpoint
    convert_dcp_to_huggingface                checkpoint → Hugging Face folder
    convert_dcp_to_torch                      checkpoint → one file of torch
    full_state_dict_to_dcp_format             state dict → checkpoint
    save_state_dict_as_huggingface_format     state dict → Hugging Face folder
    dcp_to_full_state_dict                    checkpoint → state dict
    parse_checkpoint_from_huggingface         Hugging Face folder → state dict

The first two stream: bytes go from file to file, a few blocks in memory at a time, and under torchrun, once the process
group is initialised, all ranks share the work. What was at the destination is replaced only when the new is complete.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from hpdcp._base import progress as bars
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._comm.exchange import Alone, Exchange
from hpdcp._comm.process_group import open_exchange
from hpdcp._convert._export import Export, ExportFile, ExportTensor, plan_export
from hpdcp._convert._export_run import Beside, ExportJob, Progress, counter, plain_tensors
from hpdcp._convert._full_state import full_state
from hpdcp._convert._planner import ConversionPlanner, shares
from hpdcp._convert._torch_file import ALIGNMENT, ScratchMemory, load_torch_file, local_copy, save_torch_file, upload
from hpdcp._convert.locations import (
    Access,
    FolderReader,
    Options,
    holds_checkpoint,
    holds_file,
    holds_weights,
    is_local,
    metadata_of,
    open_place,
    parent_of,
    require_checkpoint,
    require_file_name,
    the_file,
    two_places,
    verify_setting,
)
from hpdcp._convert.selection import NameOf, Rules, as_dtype, natural_key, select_tensors
from hpdcp._convert.tensor_streams import TensorStreamer
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._engine.save import save_state
from hpdcp._files import registry
from hpdcp._files.huggingface_names import NameMapping
from hpdcp._files.reader import FileSystemReader
from hpdcp._files.writer import FileSystemWriter
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.save_plan import WriteItem
from hpdcp._plan.standard_save_planner import StandardSavePlanner
from hpdcp._state.dtypes import itemsize_of
from hpdcp._state.tree import flatten_state_dict

__all__ = [
    "Conversion",
    "convert_dcp_to_huggingface",
    "convert_dcp_to_torch",
    "convert_full_checkpoint_to_dcp",
    "dcp_to_full_state_dict",
    "full_state_dict_to_dcp_format",
    "parse_checkpoint_from_huggingface",
    "save_state_dict_as_huggingface_format",
]

_PLATFORMS: Final = ("huggingface", "torch")


@dataclass(frozen=True)
class Conversion:
    """What a conversion wrote or, dry, would write."""

    src: str
    dst: str
    tensors: Mapping[str, int]
    """Name at the destination → bytes."""
    files: Mapping[str, int]
    """File at the destination → its length in bytes. Empty for a dry run into a checkpoint, which names its files when
    it is written."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Name at the source → why it is left out."""
    copied: tuple[str, ...] = ()
    """Files that are copied along."""
    dry_run: bool = False
    replaced: bool = False
    """Whether something of the kind was at the destination, which is replaced."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.tensors.values())


def convert_full_checkpoint_to_dcp(
    src: str | Path,
    dst: str | Path,
    src_platform: Literal["huggingface", "torch"] = "huggingface",
    *,
    src_storage_options: Options = None,
    dst_storage_options: Options = None,
    src_backend: str | None = None,
    dst_backend: str | None = None,
    prefix: str = "",
    name_map: NameMapping | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    no_dist: bool = False,
) -> Conversion:
    """Make a checkpoint of a Hugging Face folder, or of one file of torch.

    A Hugging Face folder is checked whole before anything is written. Its names become the keys of a flat state dict,
    as `model.state_dict()` has them. A file of torch keeps its nesting and Python values.

    Args:
        src: the folder; with "torch" the file (`.pt`, `.bin`, `.safetensors`). Any URL. A remote file of `torch.save`
            is copied to a temporary one first.
        dst: the checkpoint. One that is there is replaced in one step, at the very end.
        src_platform: "huggingface" or "torch".
        src_storage_options, dst_storage_options: for fsspec, untouched.
        src_backend, dst_backend: names of backends that go before the configuration's.
        prefix: put before every name: `"model."` for a state dict `{"model": model.state_dict()}`; safetensors only.
        name_map: stored name → wanted one, before the prefix, as in `HuggingFaceReader`; safetensors only.
        dry_run: only look, and say what would be written.
        progress: told how far this process is.
        no_dist: convert in this process alone, whatever process group there is.

    Raises:
        InvalidArgumentError: contradicting arguments; a source of another kind.
        CheckpointError, UnsafePickleError, StateDictError: a source that is damaged or cannot be stored; names file and
            key, and nothing was written.
        StorageError: a store failed; the destination is as it was.
    """
    if src_platform not in _PLATFORMS:
        raise InvalidArgumentError(f"src_platform is {src_platform!r}; expected one of {list(_PLATFORMS)}.")
    source, target = two_places(src, dst)
    from_, to = Access(src_backend, src_storage_options), Access(dst_backend, dst_storage_options)
    exchange = open_exchange(no_dist=no_dist, use_collectives=True)
    folder, file = source, None
    if src_platform == "torch":
        file = exchange.agree("looking for the file", lambda: the_file(source, from_))
        folder, _ = parent_of(source)
        if not file.endswith(".safetensors"):
            if prefix or name_map is not None:
                raise InvalidArgumentError(f"prefix and name_map do not apply to {file!r}: rename what it holds.")
            return _convert_torch_file(source, target, exchange, from_, to, dry_run=dry_run, progress=progress)
    with closing(FolderReader(folder, prefix, name_map, from_, file=file)) as reader:
        metadata = metadata_of(reader, exchange)
        stored = exchange.agree("opening the source", lambda: TensorStreamer(reader, metadata))
        tensors = _tensor_sizes(metadata)
        replaced = exchange.agree("looking at the destination", lambda: holds_checkpoint(target, to))
        if dry_run:
            planner = ConversionPlanner(stored)
            exchange.agree("checking the source", lambda: stored.check(planner.everything()))
            return Conversion(source, target, tensors, {}, dry_run=True, replaced=replaced)
        mine = shares(metadata, exchange.world_size)[exchange.rank]
        total = sum(box.volume * stored.dtype(row).itemsize for row, box in mine) if progress is not None else 0
        planner = ConversionPlanner(stored, counter(progress, total))
        try:
            saved = _save({}, planner, target, to, exchange)
        finally:
            planner.close()
        return Conversion(source, target, tensors, dict(saved.files), replaced=replaced)


def convert_dcp_to_huggingface(
    src: str | Path,
    dst: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    prefix: str = "",
    dtype: str | torch.dtype | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    name_map: NameOf | None = None,
    copy_from: str | Path | None = None,
    overwrite: bool = False,
    src_storage_options: Options = None,
    dst_storage_options: Options = None,
    src_backend: str | None = None,
    dst_backend: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    no_dist: bool = False,
) -> Conversion:
    """Make a folder of Hugging Face weights of a checkpoint that was saved under any parallel layout.

    Left out, and listed in the result: Python values, optimizer state, what each rank kept for itself, and of weights
    tied to one another all names but one (the embedding's; exclude it to keep another).

    Args:
        src: the checkpoint.
        dst: the folder. An export that is there is replaced: it loads until the new one is complete, never in part.
        max_shard_size: bytes, or "5GB", "500MB" (powers of 1000), "2GiB" (of 1024). A larger tensor has its own file.
        prefix: only names that begin so, without it: `"model."`.
        dtype: cast floating-point tensors (a complex dtype: complex ones) to it, such as `"bfloat16"`.
        include, exclude: patterns, as a shell matches files, of names without the prefix.
        name_map: name without the prefix → name in the folder: a table, in which names that stay as they are may be
            left out, or a function, that returns None for a tensor to leave out.
        copy_from: a folder or URL, on the destination's store or with options that suit both, whose other files
            (config, tokenizer; never weights) are copied along.
        overwrite: replace an export even where its shards have the names of the new ones; its index goes first, so
            that nothing loads from there until the new one is complete.
        src_storage_options, dst_storage_options, src_backend, dst_backend, dry_run, progress, no_dist: as in
            `convert_full_checkpoint_to_dcp`.

    Raises:
        InvalidArgumentError: nothing is left to export, names collide, contradicting arguments.
        UnsupportedTypeError: a dtype that the safetensors format cannot name; names the key, nothing was written.
        CheckpointExistsError: an export is in the way; nothing was changed.
        CheckpointError, StorageError, RankFailedError: on every rank; what was there loads as before.
        NotSupportedError: huggingface_hub is not installed.
    """
    source, target = two_places(src, dst)
    from_, to = Access(src_backend, src_storage_options), Access(dst_backend, dst_storage_options)
    rules = Rules(prefix, include, exclude, name_map, as_dtype(dtype))
    exchange = open_exchange(no_dist=no_dist, use_collectives=True)
    with closing(
        FileSystemReader(source, backend=from_.backend, storage_options=from_.options, verify=verify_setting())
    ) as reader:
        metadata = metadata_of(reader, exchange)

        def prepare() -> ExportJob:
            require_checkpoint(metadata, source)
            stored = TensorStreamer(reader, metadata)
            selection = select_tensors(stored, rules)
            exported = [ExportTensor.of(each.name, each.dtype, each.shape) for each in selection.tensors]
            plan = plan_export(exported, max_shard_size)
            stored.check([each.wanted for each in selection.tensors])
            beside = Beside(copy_from, target, from_, to)
            beside.find()
            return ExportJob(stored, {each.name: each for each in selection.tensors}, plan, selection.skipped, beside)

        job = exchange.agree("planning the export", prepare)
        replaced = exchange.agree("looking at the destination", lambda: holds_weights(target, to))
        if not dry_run:
            backend = exchange.agree("opening the destination", lambda: open_place(target, to))
            with closing(backend):
                job.run(backend, exchange, overwrite=overwrite, progress=progress)
        return Conversion(
            source,
            target,
            job.sizes,
            job.plan.sizes,
            job.skipped,
            tuple(job.beside.files),
            dry_run=dry_run,
            replaced=replaced,
        )


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
    source, target = two_places(src, dst)
    require_file_name(dst, target)
    from_, to = Access(src_backend, src_storage_options), Access(dst_backend, dst_storage_options)
    with closing(
        FileSystemReader(
            source,
            backend=from_.backend,
            storage_options=from_.options,
            allow_pickle=allow_pickle,
            verify=verify_setting(),
        )
    ) as reader:
        metadata = metadata_of(reader, Alone())
        require_checkpoint(metadata, source)
        tensors = _tensor_sizes(metadata)
        replaced = holds_file(target, to)
        if dry_run:
            return Conversion(source, target, tensors, {}, dry_run=True, replaced=replaced)
        local_folder = parent_of(target)[0] if is_local(target) else None
        if local_folder is not None:
            os.makedirs(local_folder, exist_ok=True)
        scratch = ScratchMemory(sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in tensors.values()), local_folder)
        value = full_state(reader, metadata, allocate=scratch.allocate, check_all=True)
        if is_local(target):
            size = _write_torch_file(value, tensors, target)
        else:
            folder, name = parent_of(target)
            with closing(open_place(folder, to)) as backend, tempfile.TemporaryDirectory() as spool:
                size = _write_torch_file(value, tensors, os.path.join(spool, "file"))
                backend.prepare()
                with bars.bar("upload", size):
                    upload(os.path.join(spool, "file"), bars.counted(backend), name)
        return Conversion(source, target, tensors, {target: size}, replaced=replaced)


def full_state_dict_to_dcp_format(
    state_dict: Mapping[Any, Any], dst: str | Path, *, dst_storage_options: Options = None, no_dist: bool = False
) -> Metadata:
    """Make a checkpoint of a state dict that is whole in this process.

    Under a process group all ranks call it with the same state and write a share each; with `no_dist` one of them does
    it alone.

    Raises:
        StateDictError, CheckpointError, StorageError: as `hpdcp.save`.
    """
    exchange = open_exchange(no_dist=no_dist, use_collectives=True)
    target = registry.resolve_checkpoint_id(dst)
    return _save(
        state_dict,
        StandardSavePlanner(enable_plan_caching=False),
        target,
        Access(options=dst_storage_options),
        exchange,
    )


def save_state_dict_as_huggingface_format(
    save_directory: str | Path,
    state_dict: Mapping[Any, Any],
    max_shard_size: int | str = "5GB",
    *,
    dst_storage_options: Options = None,
    overwrite: bool = False,
) -> Conversion:
    """Make a folder of Hugging Face weights of the tensors in this process; the keys of nested dicts joined by dots.

    Tensors of any device, strides and, where safetensors names it, dtype. Tied tensors are stored once. A DTensor is
    refused: `hpdcp.save` and `convert_dcp_to_huggingface` gather nothing.

    Args:
        save_directory, max_shard_size, dst_storage_options, overwrite: as in `convert_dcp_to_huggingface`.

    Raises:
        UnsupportedTypeError: a value that is no plain tensor, or a dtype safetensors cannot name; nothing was written.
        InvalidArgumentError, CheckpointExistsError, StorageError: as `convert_dcp_to_huggingface`.
    """
    target = registry.resolve_checkpoint_id(save_directory)
    tensors, skipped = plain_tensors(state_dict)
    names = sorted(tensors, key=natural_key)
    exported = [ExportTensor.of(name, tensors[name].dtype, tensors[name].shape) for name in names]
    plan = plan_export(exported, max_shard_size)

    def pieces(file: ExportFile) -> Iterator[memoryview]:
        for tensor in file.tensors:
            yield from byte_pieces(tensors[tensor.name])

    with closing(open_place(target, Access(options=dst_storage_options))) as backend:
        Export(backend, plan, Alone(), overwrite=overwrite).write(pieces)
    return Conversion("a state dict", target, {each.name: each.nbytes for each in exported}, plan.sizes, skipped)


def dcp_to_full_state_dict(
    src: str | Path, *, src_storage_options: Options = None, allow_pickle: bool | None = None
) -> dict[Any, Any]:
    """The whole of a checkpoint as one state dict on the CPU, nesting and Python values as they were saved.

    Where the store can map files, tensors are private maps of them: bytes are read when touched, and what is changed
    is copied then, page by page, so that the tensors may be trained on and the files stay as they are. Tied tensors are
    one tensor. What each rank kept for itself is a list, rank by rank. Keys of a dict come sorted by name.

    Raises:
        CheckpointError, StorageError, UnsafePickleError: naming the key.
    """
    source = registry.resolve_checkpoint_id(src)
    with closing(FileSystemReader(source, storage_options=src_storage_options, allow_pickle=allow_pickle)) as reader:
        metadata = metadata_of(reader, Alone())
        require_checkpoint(metadata, source)
        return full_state(reader, metadata)


def parse_checkpoint_from_huggingface(
    src: str | Path, *, src_storage_options: Options = None
) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face folder by name, on the CPU; mapped as `dcp_to_full_state_dict` maps.

    Raises:
        CheckpointError, StorageError: a folder that is damaged, incomplete or something else; names file and key.
    """
    source = registry.resolve_checkpoint_id(src)
    with closing(FolderReader(source, "", None, Access(options=src_storage_options), file=None)) as reader:
        return full_state(reader, metadata_of(reader, Alone()))


def _convert_torch_file(
    source: str,
    target: str,
    exchange: Exchange,
    from_: Access,
    to: Access,
    *,
    dry_run: bool,
    progress: Progress | None,
) -> Conversion:
    folder, name = parent_of(source)
    with (
        closing(exchange.agree("opening the source", lambda: open_place(folder, from_))) as backend,
        local_copy(backend, name, source if is_local(source) else None) as path,
    ):
        state = exchange.agree("reading the file", lambda: load_torch_file(path, shown=source))
        flat, _ = flatten_state_dict(state)
        tensors = {key: value.nbytes for key, value in flat.items() if isinstance(value, torch.Tensor)}
        replaced = exchange.agree("looking at the destination", lambda: holds_checkpoint(target, to))
        if dry_run:
            return Conversion(source, target, tensors, {}, dry_run=True, replaced=replaced)
        planner = _CountingPlanner(counter(progress, sum(tensors.values())))
        saved = _save(state, planner, target, to, exchange)
        return Conversion(source, target, tensors, dict(saved.files), replaced=replaced)


def _write_torch_file(value: Any, tensors: Mapping[str, int], path: str) -> int:
    with bars.bar("convert", sum(tensors.values())) as shown:
        return save_torch_file(value, path, shown.add)


class _CountingPlanner(StandardSavePlanner):
    """Tells how much was written."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__(enable_plan_caching=False)
        self._count = count

    def get_parts(self, item: WriteItem) -> Iterable[torch.Tensor]:
        yield from super().get_parts(item)
        self._count(item.nbytes)


def _save(
    state_dict: Mapping[Any, Any], planner: SavePlanner, target: str, access: Access, exchange: Exchange
) -> Metadata:
    return save_state(
        state_dict,
        open_writer=lambda: FileSystemWriter(target, backend=access.backend, storage_options=access.options),
        planner=planner,
        exchange=exchange,
        collective=True,
    )


def _tensor_sizes(metadata: Metadata) -> dict[str, int]:
    """Name → bytes of every stored tensor; of state that ranks kept, each rank's under its own name."""
    entries, found = metadata.entries, dict[str, int]()
    volumes = entries.volumes()
    for row in np.flatnonzero(entries.kinds == EntryKind.TENSOR).tolist():
        owner = int(entries.owners[row])
        name = entries.fqns[row] if owner < 0 else f"{entries.fqns[row]} of rank {owner}"
        found[name] = int(volumes[row]) * itemsize_of(entries.dtype(row))
    return found
