"""The stages of every conversion into a checkpoint that streams: what is read is never whole in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from hpdcp._comm.exchange import Exchange
from hpdcp._convert._location import Location
from hpdcp._convert._planner import ConversionPlanner, shares
from hpdcp._convert.conversion import Conversion, ConversionOptions, tensor_sizes
from hpdcp._convert.tensor_streams import TensorStreamer
from hpdcp._engine.save import save_state
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import SavePlanner
from hpdcp._state.dtypes import itemsize_of


def save_streamed(
    reader: FileSystemReader,
    metadata: Metadata,
    options: ConversionOptions,
    exchange: Exchange,
    *,
    planner_class: type[ConversionPlanner] = ConversionPlanner,
    layout: str | None = None,
) -> Conversion:
    """Write what `reader` reads as a checkpoint, each rank its share; dry: only look whether all of it is there."""
    streamer = exchange.agree("opening the source", lambda: TensorStreamer(reader, metadata))
    sizes = tensor_sizes(metadata)
    replaced = exchange.agree("looking at the destination", options.destination.holds_checkpoint)
    if options.dry_run:
        exchange.agree("checking the source", lambda: streamer.check(shares(metadata, 1)[0]))
        return options.result(sizes, {}, replaced=replaced)
    share = shares(metadata, exchange.world_size)[exchange.rank]
    total = sum(each.box.volume * itemsize_of(metadata.entries.dtype(each.row)) for each in share)
    with closing(planner_class(streamer, options.progress_counter(total))) as planner:
        saved = save_to(options.destination, {}, planner, exchange, layout)
    return options.result(sizes, dict(saved.files), replaced=replaced)


def save_to(
    destination: Location,
    state_dict: Mapping[Any, Any],
    planner: SavePlanner,
    exchange: Exchange,
    layout: str | None = None,
) -> Metadata:
    """Save a checkpoint at the destination, by all ranks of `exchange` together."""
    return save_state(
        state_dict,
        open_writer=lambda: destination.checkpoint_writer(layout),
        planner=planner,
        exchange=exchange,
        collective=True,
    )
