"""Folders of Hugging Face weights made of checkpoints and of state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpdcp._base import progress as bars
from hpdcp._base.arguments import require_flags
from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._base.natural_order import natural_key
from hpdcp._comm.exchange import Alone, Exchange
from hpdcp._convert._auxiliary_files import AuxiliaryFiles
from hpdcp._convert._export import Export
from hpdcp._convert._export_plan import ExportFile, ExportPlan, ExportTensor, plan_export
from hpdcp._convert._location import Location, Options, verify_setting
from hpdcp._convert._selection import NameOf, SelectionRules, as_dtype, preference, select_tensors
from hpdcp._convert._sources import checkpoint_metadata
from hpdcp._convert.conversion import Conversion, ConversionOptions, Progress
from hpdcp._convert.tensor_streams import StreamRequest, TensorStreamer
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._state.ties import tie_key
from hpdcp._state.tree import flatten_state_dict


@dataclass(frozen=True, kw_only=True)
class _ExportOptions(ConversionOptions):
    """What `convert_dcp_to_huggingface` is told."""

    max_shard_size: int | str
    rules: SelectionRules
    auxiliary: Location | None
    """Whose other files are copied along."""
    overwrite: bool


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
        CheckpointExistsError: an export is in the way, or another is being written there; nothing was changed.
        CheckpointError, StorageError, RankFailedError: on every rank; what was there loads as before.
        NotSupportedError: huggingface_hub is not installed.
    """
    require_flags(overwrite=overwrite, dry_run=dry_run)
    source = Location.of(src, src_backend, src_storage_options)
    destination = Location.of(dst, dst_backend, dst_storage_options)
    options = _ExportOptions(
        source=source,
        destination=destination,
        max_shard_size=max_shard_size,
        rules=SelectionRules(prefix, include, exclude, name_map, as_dtype(dtype)),
        auxiliary=None if copy_from is None else _auxiliary_location(copy_from, source, destination),
        overwrite=overwrite,
        dry_run=dry_run,
        progress=progress,
        no_dist=no_dist,
    )
    return _export(options, options.open_exchange())


def _export(options: _ExportOptions, exchange: Exchange) -> Conversion:
    with closing(options.source.checkpoint_reader(verify=verify_setting())) as reader:
        metadata = checkpoint_metadata(reader, exchange)
        planned = exchange.agree(
            "planning the export", lambda: _PlannedExport.of(TensorStreamer(reader, metadata), options)
        )
        replaced = exchange.agree("looking at the destination", options.destination.holds_weights)
        if not options.dry_run:
            planned.write(exchange)
        return options.result(
            planned.plan.tensor_sizes,
            planned.plan.sizes,
            skipped=planned.skipped,
            copied=tuple(planned.auxiliary.sizes),
            replaced=replaced,
        )


def _auxiliary_location(copy_from: str | Path, source: Location, destination: Location) -> Location:
    """Opened with the options of the store at hand where it is remote, else as configured."""
    found = Location.of(copy_from)
    if found.is_local:
        return found
    known = next((each for each in (source, destination) if each.storage_options), found)
    return Location(found.url, known.backend, known.storage_options)


@dataclass(frozen=True)
class _PlannedExport:
    """What goes into the folder, and from where."""

    options: _ExportOptions
    streamer: TensorStreamer
    requests: Mapping[str, StreamRequest]
    """Name in the folder → what is streamed into it."""
    plan: ExportPlan
    skipped: Mapping[str, str]
    auxiliary: AuxiliaryFiles

    @classmethod
    def of(cls, streamer: TensorStreamer, options: _ExportOptions) -> _PlannedExport:
        selection = select_tensors(streamer, options.rules)
        plan = plan_export(
            [ExportTensor.of(each.name, each.dtype, each.shape) for each in selection.tensors], options.max_shard_size
        )
        requests = {each.name: each.request for each in selection.tensors}
        streamer.check(requests.values())
        auxiliary = AuxiliaryFiles.find(options.auxiliary, leave_out=options.destination)
        return cls(options, streamer, requests, plan, selection.skipped, auxiliary)

    def write(self, exchange: Exchange) -> None:
        """Write the folder, each rank files of its own."""
        total = sum(file.nbytes for file in self.plan.shares(exchange.world_size)[exchange.rank])
        count = self.options.progress_counter(total)
        backend = exchange.agree("opening the destination", self.options.destination.open)
        with closing(backend), bars.bar("convert", total) as shown:

            def contents(file: ExportFile) -> Iterator[memoryview]:
                with closing(self.streamer.stream([self.requests[tensor.name] for tensor in file.tensors])) as stream:
                    for _, part in stream:
                        yield from byte_pieces(part)
                        nbytes = part.numel() * part.element_size()
                        shown.add(nbytes)
                        count(nbytes)

            Export(
                backend,
                self.plan,
                exchange,
                overwrite=self.options.overwrite,
                write_auxiliary=lambda: self.auxiliary.copy_to(backend),
            ).write(contents)


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
    require_flags(overwrite=overwrite)
    destination = Location.of(save_directory, storage_options=dst_storage_options)
    tensors, skipped = _plain_tensors(state_dict)
    names = sorted(tensors, key=natural_key)
    exported = [ExportTensor.of(name, tensors[name].dtype, tensors[name].shape) for name in names]
    plan = plan_export(exported, max_shard_size)

    def contents(file: ExportFile) -> Iterator[memoryview]:
        for tensor in file.tensors:
            yield from byte_pieces(tensors[tensor.name])

    with closing(destination.open()) as backend:
        Export(backend, plan, Alone(), overwrite=overwrite).write(contents)
    return Conversion("a state dict", destination.url, plan.tensor_sizes, plan.sizes, skipped)


def _plain_tensors(state_dict: Mapping[Any, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors to store, and which names are left out since they are tied to others."""
    flat, _ = flatten_state_dict(state_dict)
    for name, value in flat.items():
        if isinstance(value, DTensor):
            raise UnsupportedTypeError(
                f"{name!r} is a DTensor, of which this process has a part. hpdcp.save it from all ranks, and make the "
                "folder of that checkpoint with convert_dcp_to_huggingface."
            )
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
            raise UnsupportedTypeError(
                f"{name!r} is a {type(value).__name__}; Hugging Face weights are plain dense tensors. Leave it out."
            )
    first: dict[object, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    skipped: dict[str, str] = {}
    for name in sorted(flat, key=preference):
        tie = tie_key(flat[name])
        if tie is not None and tie in first:
            skipped[name] = f"tied to {first[tie]!r}, stored once"
            continue
        if tie is not None:
            first[tie] = name
        tensors[name] = flat[name]
    return tensors, skipped
