"""A checkpoint written again, under another layout or on another store: tensors, Python values and all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpdcp._base.arguments import require_flags
from hpdcp._comm.exchange import Exchange
from hpdcp._convert._location import Location, Options, verify_setting
from hpdcp._convert._planner import ConversionPlanner
from hpdcp._convert._sources import checkpoint_metadata
from hpdcp._convert._streamed_save import save_streamed
from hpdcp._convert.conversion import Conversion, ConversionOptions, Progress
from hpdcp._convert.stored_objects import object_rows, read_objects
from hpdcp._convert.tensor_streams import TensorStreamer
from hpdcp._format.columns import EntryKind, concat_chunks
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.save_plan import SavePlan, WriteItem


@dataclass(frozen=True, kw_only=True)
class _CopyOptions(ConversionOptions):
    """What `convert_dcp_to_dcp` is told."""

    layout: str | None


def convert_dcp_to_dcp(
    src: str | Path,
    dst: str | Path,
    *,
    layout: str | None = None,
    src_storage_options: Options = None,
    dst_storage_options: Options = None,
    src_backend: str | None = None,
    dst_backend: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    no_dist: bool = False,
) -> Conversion:
    """Write a checkpoint again in another layout, or to another store; it loads as the first one does.

    Names, nesting, tied tensors, Python values (byte for byte, none is decoded) and what each rank kept for itself stay
    as they are. Tensors are stored whole, or in a few parts where they are large. Bytes go from store to store, a few
    blocks in memory at a time, and under torchrun all ranks share the work.

    Args:
        src: the checkpoint, one of torch.distributed.checkpoint, or a group of zarr that another program wrote.
        dst: where to write it. A checkpoint that is there is replaced in one step, at the very end, or refused where
            its layout does not allow that.
        layout: of the new one; None: as configured.
        src_storage_options, dst_storage_options: for fsspec, untouched.
        src_backend, dst_backend: names of backends that go before the configuration's.
        dry_run: only look, and say what would be written.
        progress: told how far this process is.
        no_dist: convert in this process alone, whatever process group there is.

    Raises:
        CheckpointError, StateDictError: a source that is damaged, or cannot be stored in that layout.
        StorageError: a store failed; the destination is as it was.
    """
    require_flags(dry_run=dry_run)
    options = _CopyOptions(
        source=Location.of(src, src_backend, src_storage_options),
        destination=Location.of(dst, dst_backend, dst_storage_options),
        layout=layout,
        dry_run=dry_run,
        progress=progress,
        no_dist=no_dist,
    )
    return copy_checkpoint(options, options.open_exchange(), layout=options.layout)


def copy_checkpoint(options: ConversionOptions, exchange: Exchange, *, layout: str | None = None) -> Conversion:
    """Write the source again at the destination; as `convert_dcp_to_dcp`, on all ranks of `exchange`."""
    with closing(options.source.checkpoint_reader(verify=verify_setting())) as reader:
        metadata = checkpoint_metadata(reader, exchange)
        return save_streamed(reader, metadata, options, exchange, planner_class=_CopyPlanner, layout=layout)


class _CopyPlanner(ConversionPlanner):
    """Stores Python values as well, all of them on the coordinator, as the source encoded them."""

    def __init__(self, streamer: TensorStreamer, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(streamer, on_bytes)
        self._metadata = streamer.metadata
        self._reader = streamer.reader
        self._values: dict[tuple[str, int | None], bytes] = {}

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        super().configure_planner(state_dict, context)
        rows = object_rows(self._metadata) if context.is_coordinator else []
        for row, data in read_objects(self._reader, self._metadata, rows).items():
            entry = self._metadata.entries[row]
            self._values[entry.fqn, entry.owner] = data

    def build_local_plan(self) -> SavePlan:
        tensors = super().build_local_plan()
        values = SavePlan.build(
            [tensors.entries[row] for row in range(len(tensors.entries))],
            [
                WriteItem(MetadataIndex(fqn, owner=owner), EntryKind.OBJECT, len(data))
                for (fqn, owner), data in self._values.items()
            ],
        )
        return SavePlan(
            tensors.entries,
            concat_chunks([tensors.chunks, values.chunks]),
            np.concatenate([tensors.nbytes, values.nbytes]),
        )

    def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        written, metadata = super().build_global_plan(plans)
        # What ranks kept for themselves is theirs, however many convert.
        settings = {**metadata.settings, "world_size": str(self._metadata.world_size)}
        return written, replace(metadata, settings=settings)

    def expect(self, items: Sequence[WriteItem]) -> None:
        super().expect([item for item in items if item.kind is EntryKind.TENSOR])

    def get_bytes(self, item: WriteItem) -> bytes:
        return self._values[item.index.fqn, item.index.owner]
