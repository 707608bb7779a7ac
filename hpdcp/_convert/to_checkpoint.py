"""Checkpoints made of Hugging Face folders, of files of torch, and of state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from hpdcp._base.arguments import require_flags
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._comm.exchange import Exchange
from hpdcp._comm.process_group import open_exchange
from hpdcp._convert._location import Location, Options
from hpdcp._convert._sources import WeightsReader, is_torch_folder, metadata_of, require_weights_file
from hpdcp._convert._streamed_save import save_streamed, save_to
from hpdcp._convert._torch_file import load_torch_file, local_copy
from hpdcp._convert.conversion import Conversion, ConversionOptions, Progress
from hpdcp._convert.copy import copy_checkpoint
from hpdcp._files.huggingface_names import NameMapping
from hpdcp._format.metadata import Metadata
from hpdcp._plan.save_plan import WriteItem
from hpdcp._plan.standard_save_planner import StandardSavePlanner
from hpdcp._state.tree import flatten_state_dict

_PLATFORMS: Final = ("huggingface", "torch")


@dataclass(frozen=True, kw_only=True)
class _ImportOptions(ConversionOptions):
    """What `convert_full_checkpoint_to_dcp` is told."""

    platform: str
    prefix: str
    name_map: NameMapping | None

    def __post_init__(self) -> None:
        if self.platform not in _PLATFORMS:
            raise InvalidArgumentError(f"src_platform is {self.platform!r}; expected one of {list(_PLATFORMS)}.")
        super().__post_init__()


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
    """Make a checkpoint of a Hugging Face folder, of one file of torch, or of a folder that torch's DCP saved to.

    A Hugging Face folder is checked whole before anything is written. Its names become the keys of a flat state dict,
    as `model.state_dict()` has them. A file of torch keeps its nesting and Python values, and so does a folder of
    torch.distributed.checkpoint, which is read and written a few blocks at a time.

    Args:
        src: the folder; with "torch" the file (`.pt`, `.bin`, `.safetensors`), or the folder with torch's `.metadata`.
            Any URL. A remote file of `torch.save` is copied to a temporary one first.
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
    require_flags(dry_run=dry_run)
    options = _ImportOptions(
        source=Location.of(src, src_backend, src_storage_options),
        destination=Location.of(dst, dst_backend, dst_storage_options),
        platform=src_platform,
        prefix=prefix,
        name_map=name_map,
        dry_run=dry_run,
        progress=progress,
        no_dist=no_dist,
    )
    exchange = options.open_exchange()
    if options.platform == "huggingface":
        return _from_weights(options, exchange, options.source)
    if exchange.agree("looking for the source", lambda: is_torch_folder(options.source)):
        _refuse_names(options)
        return copy_checkpoint(options, exchange)
    exchange.agree("looking for the file", lambda: require_weights_file(options.source))
    if options.source.name.endswith(".safetensors"):
        return _from_weights(options, exchange, options.source.parent, file=options.source.name)
    return _from_torch_file(options, exchange)


def _from_weights(
    options: _ImportOptions, exchange: Exchange, folder: Location, *, file: str | None = None
) -> Conversion:
    with closing(WeightsReader(folder, prefix=options.prefix, name_map=options.name_map, file=file)) as reader:
        return save_streamed(reader, metadata_of(reader, exchange), options, exchange)


def _refuse_names(options: _ImportOptions) -> None:
    if options.prefix or options.name_map is not None:
        raise InvalidArgumentError(
            f"prefix and name_map do not apply to {options.source.name!r}: rename what it holds."
        )


def _from_torch_file(options: _ImportOptions, exchange: Exchange) -> Conversion:
    source = options.source
    _refuse_names(options)
    with (
        closing(exchange.agree("opening the source", source.parent.open)) as backend,
        local_copy(backend, source.name, source.url if source.is_local else None) as path,
    ):
        state = exchange.agree("reading the file", lambda: load_torch_file(path, shown=source.url))
        flat, _ = flatten_state_dict(state)
        sizes = {name: value.nbytes for name, value in flat.items() if isinstance(value, torch.Tensor)}
        replaced = exchange.agree("looking at the destination", options.destination.holds_checkpoint)
        if options.dry_run:
            return options.result(sizes, {}, replaced=replaced)
        planner = _CountingPlanner(options.progress_counter(sum(sizes.values())))
        saved = save_to(options.destination, state, planner, exchange)
        return options.result(sizes, dict(saved.files), replaced=replaced)


class _CountingPlanner(StandardSavePlanner):
    """Tells how much was written."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__(enable_plan_caching=False)
        self._count = count

    def get_parts(self, item: WriteItem) -> Iterable[torch.Tensor]:
        yield from super().get_parts(item)
        self._count(item.nbytes)


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
    destination = Location.of(dst, storage_options=dst_storage_options)
    return save_to(destination, state_dict, StandardSavePlanner(enable_plan_caching=False), exchange)
