"""The verbs: save and load."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpdcp._base import arguments, config
from hpdcp._base.arguments import require_instance
from hpdcp._base.timing import timed
from hpdcp._broadcast.terms import DEFAULT_BATCH_BYTES, BroadcastOptions
from hpdcp._comm.process_group import open_exchange
from hpdcp._engine.load import load_state
from hpdcp._engine.save import save_state
from hpdcp._files.reader import open_reader
from hpdcp._files.writer import open_writer
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import LoadPlanner, SavePlanner
from hpdcp._plan.standard_load_planner import StandardLoadPlanner
from hpdcp._plan.standard_save_planner import StandardSavePlanner
from hpdcp._plan.storage import StorageReader, StorageWriter


@timed("save")
def save(
    state_dict: Mapping[Any, Any],
    *,
    checkpoint_id: str | Path | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save `state_dict`; every rank of the default process group calls it, and returns when all data is durable.

    Args:
        state_dict: a dict of tensors (DTensors, plain, ragged), Python values, `PerRank` state, objects with
            `state_dict()` and `load_state_dict()`, and dicts, lists and tuples of these. Nothing of it is changed.
        checkpoint_id: the folder or URL. An existing checkpoint there is replaced in one step, at the very end.
        storage_writer: in place of the configured one; with a `checkpoint_id`, it is given that.
        planner: in place of `StandardSavePlanner()`.
        no_dist: save this process's state alone, as rank 0 of 1, and publish `0.metadata`. One that a process saved so
            before is replaced in one step.
        use_collectives: False: each rank saves what it holds and publishes `{rank}.metadata`, without a plan of all;
            the call returns when all ranks have, so that a load finds every file. All ranks must pass the same value:
            one that alone passes False cannot be detected and leaves the rest waiting.

    Returns:
        What was saved, on every rank; without collectives, what this rank saved.

    Raises:
        InvalidArgumentError: neither `checkpoint_id` nor `storage_writer` is given.
        StateDictError: something cannot be stored so that it comes back exactly; names the key.
        CheckpointError, StorageError, RankFailedError: on every rank, naming rank and cause; nothing was published.
    """
    exchange = open_exchange(no_dist=no_dist, use_collectives=use_collectives)
    writers: list[StorageWriter] = []

    def opened() -> StorageWriter:
        # Where a failure reaches all ranks.
        require_instance("state_dict", state_dict, Mapping, instead="a dict, such as {'model': model}")
        require_instance("planner", planner, SavePlanner, instead=arguments.SAVE_PLANNER)
        writers.append(open_writer(checkpoint_id, storage_writer))
        return writers[0]

    def saved() -> Metadata:
        return save_state(
            state_dict,
            open_writer=opened,
            planner=planner or StandardSavePlanner(),
            exchange=exchange,
            collective=use_collectives and not no_dist,
        )

    if use_collectives or no_dist:
        return saved()
    everybody = open_exchange(no_dist=False, use_collectives=True)
    published: list[Metadata] = []

    def which() -> list[int]:
        published.append(saved())
        told = published[0].settings.get("set", "").encode()
        return [int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "little")]

    if operator.eq(*everybody.min_max("saving, each rank for itself", 1, which)):
        # Of ranks that were at different calls nobody knows what is whole, and all is kept.
        writers[0].all_published()
    return published[0]


@timed("load")
def load(
    state_dict: Mapping[Any, Any],
    *,
    checkpoint_id: str | Path | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    broadcast_replicated_tensors: bool | None = None,
    broadcast_groups: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None,
    broadcast_batch_bytes: int = DEFAULT_BATCH_BYTES,
) -> None:
    """Fill `state_dict` in place from a checkpoint, saved under whatever parallel layout.

    Tensors are filled in their own memory, Python values are put back into the dict as they were stored. Keys that are
    stored and not asked for are left alone. Every rank of the default process group calls it.

    Args:
        state_dict: the targets. Objects with `load_state_dict()` get their state through it at the end.
        checkpoint_id: the folder or URL.
        storage_reader: in place of the configured one; with a `checkpoint_id`, it is given that.
        planner: in place of `StandardLoadPlanner()`.
        no_dist: load in this process alone, without its process group.
        use_collectives: False: each rank reads the metadata and its part by itself. All ranks must pass the same value.
        broadcast_replicated_tensors: whether what several ranks want is read by one and sent to the others. None: as
            configured, by default yes unless these ranks share one host's page cache.
        broadcast_groups: process groups to use, by the tuple of their ranks; missing ones are created for this load.
            Given with None, it counts as True.
        broadcast_batch_bytes: shards below this many bytes are sent together; 0: each by itself.

    Raises:
        InvalidArgumentError: contradicting arguments; neither `checkpoint_id` nor `storage_reader`.
        LoadMismatchError: keys, shapes or dtypes that do not fit, or parts that are not stored; all are listed,
            and no tensor was changed.
        CheckpointError, StorageError, RankFailedError: on every rank; targets may be changed in part.
    """
    with contextlib.ExitStack() as stack:

        def opened() -> StorageReader:
            # Where a failure reaches all ranks.
            require_instance("state_dict", state_dict, Mapping, instead="a dict, such as {'model': model}")
            require_instance("planner", planner, LoadPlanner, instead=arguments.LOAD_PLANNER)
            return open_reader(checkpoint_id, storage_reader, stack)

        load_state(
            state_dict,
            broadcasts=lambda: BroadcastOptions.from_flags(
                configured=config.current().broadcast,
                replicated_tensors=broadcast_replicated_tensors,
                groups=broadcast_groups,
                batch_bytes=broadcast_batch_bytes,
                alone="no_dist=True" if no_dist else None if use_collectives else "use_collectives=False",
            ),
            open_reader=opened,
            planner=planner or StandardLoadPlanner(),
            exchange=open_exchange(no_dist=no_dist, use_collectives=use_collectives),
        )
