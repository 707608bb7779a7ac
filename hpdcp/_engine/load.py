"""The one path every load takes: read the metadata once, plan, check, read what is shared once and the rest each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch.distributed as dist

from hpdcp._base import config, progress
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    IncompleteCheckpointError,
    LoadMismatchError,
    MissingKeysError,
)
from hpdcp._base.timing import stage, timed
from hpdcp._broadcast.decision import SharingOptions, groups_at_hand, new_groups, share
from hpdcp._broadcast.reader_choice import Group
from hpdcp._broadcast.walk import broadcast_groups_for_load, read_and_broadcast
from hpdcp._comm.exchange import Alone, Exchange
from hpdcp._comm.process_group import ProcessGroupExchange
from hpdcp._devices.streams import after_the_caller
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import LoadPlan, decided_plan, decision_bytes
from hpdcp._plan.planner import LoadPlanner, PlannerContext
from hpdcp._plan.storage import RankMetadata, StorageReader
from hpdcp._state.dtypes import itemsize_of

_Groups: TypeAlias = Mapping[Group, dist.ProcessGroup]

_GLOBAL: Final = b"G"
_BY_RANK: Final = b"R"
_READING: Final = "reading into the targets (what they hold now is undefined)"


@timed("_load_impl")
def load_state(
    state_dict: Mapping[Any, Any],
    *,
    open_reader: Callable[[], StorageReader],
    planner: LoadPlanner,
    exchange: Exchange,
    sharing: Callable[[], SharingOptions] = SharingOptions,
) -> None:
    """Fill `state_dict` in place from the checkpoint of a reader, on all ranks of `exchange`.

    `open_reader` and `sharing` run where a failure reaches all ranks.

    Where there is no global metadata but ranks saved each for itself, each rank reads for itself as well.
    """
    load = _Load(state_dict, open_reader, planner, exchange, sharing)
    if isinstance(exchange, Alone):
        load.check_arguments()
    try:
        load.run()
    except CheckpointReplacedError:
        # All ranks are told of it in the same step, so all of them start again or none.
        if load.reading:
            raise
        load.run()


def find_metadata(
    reader: Callable[[], StorageReader], exchange: Exchange
) -> tuple[Metadata | None, RankMetadata | None]:
    """The global metadata, or else the ranks' own. The coordinator looks once, and all take its answer."""

    def look() -> bytes:
        try:
            return _GLOBAL + reader().load_metadata().to_bytes()
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            if reader().load_rank_metadata(exchange.rank) is None:
                raise
            return _BY_RANK

    with stage("load_metadata"):
        answer = exchange.broadcast("reading the metadata", look)
    if answer[:1] == _GLOBAL:
        return Metadata.from_bytes(memoryview(answer)[1:], where="the checkpoint's metadata"), None
    return None, exchange.agree("reading the ranks' metadata", lambda: reader().load_rank_metadata(exchange.rank))


class _Load:
    def __init__(
        self,
        state_dict: Mapping[Any, Any],
        open_reader: Callable[[], StorageReader],
        planner: LoadPlanner,
        exchange: Exchange,
        sharing: Callable[[], SharingOptions],
    ) -> None:
        self._sharing_of_flags = sharing
        self._state_dict = state_dict
        self._open_reader = open_reader
        self._planner = planner
        self._exchange = exchange
        self.reading = False
        """Whether targets may have been changed."""

    @cached_property
    def _reader(self) -> StorageReader:
        return self._open_reader()

    @cached_property
    def _sharing(self) -> SharingOptions:
        return self._sharing_of_flags()

    def check_arguments(self) -> None:
        """Raise what is wrong with them before anything is read."""
        _ = self._sharing

    def run(self) -> None:
        metadata, apart = find_metadata(lambda: self._reader, self._exchange)
        if metadata is not None:
            self._load_from(metadata, self._exchange)
            return
        assert apart is not None
        alone = Alone(self._exchange.rank, self._exchange.world_size)
        own = apart.own(self._exchange.world_size)
        if own is None or not self._covered_by(own, alone):
            self._load_from(apart.merged(), alone)

    def _covered_by(self, own: Metadata, alone: Exchange) -> bool:
        try:
            return self._load_from(own, alone, only_if_complete=True)
        except LoadMismatchError:
            return False

    def _load_from(self, metadata: Metadata, exchange: Exchange, *, only_if_complete: bool = False) -> bool:
        collective = not isinstance(exchange, Alone)
        context = PlannerContext(
            exchange.rank, exchange.world_size, exchange.is_coordinator, collective, self._reader.allow_pickle
        )

        def plan_locally() -> bytes:
            progress.check()
            self._planner.configure_planner(self._state_dict, metadata, context)
            self._reader.configure_reader(metadata, context)
            with stage("build_local_plan"):
                plan = self._reader.optimize_local_plan(self._local_plan_of_planner())
            said = self._sharing.said(shares_page_cache=self._reader.shares_page_cache)
            self._local_plan = plan.with_storage_data({**plan.storage_data, **said})
            return self._local_plan.to_bytes()

        def plan_globally(parts: list[bytes]) -> list[bytes]:
            local_plans = [LoadPlan.from_bytes(part) for part in parts]
            with stage("build_global_plan"):
                plans = self._reader.optimize_global_plan(self._planner.build_global_plan(local_plans))
                if collective:
                    plans = share(plans, [plan.storage_data for plan in local_plans], metadata)
            return [decision_bytes(plan, local) for plan, local in zip(plans, local_plans, strict=True)]

        with stage("all_gather_object"):
            decision = exchange.gather_scatter("planning the load", plan_locally, plan_globally)
        if only_if_complete and not self._planner.complete:
            return False
        plan = decided_plan(decision, self._local_plan)
        self.reading = True
        with after_the_caller(), self._groups_for(plan, exchange) as groups:
            exchange.agree(_READING, lambda: self._read(plan, groups, exchange.rank, metadata))
        exchange.agree("finishing the load", self._planner.finish_load)
        return True

    def _local_plan_of_planner(self) -> LoadPlan:
        try:
            return self._planner.build_local_plan()
        except LoadMismatchError as error:
            advice = self._reader.mismatch_advice
            # Names may be among several kinds of trouble; in an error of any other one kind they are not.
            if not advice or type(error) not in (MissingKeysError, LoadMismatchError):
                raise
            raise type(error)(f"{error} {advice}") from None

    @contextlib.contextmanager
    def _groups_for(self, plan: LoadPlan, exchange: Exchange) -> Iterator[tuple[_Groups, _Groups]]:
        """Process groups that carry host tensors, and those that carry devices'."""
        if not isinstance(exchange, ProcessGroupExchange):
            yield {}, {}
            return
        over_hosts, on_devices = groups_at_hand(plan, self._sharing, exchange.group)
        new, new_on_devices, backend = new_groups(plan)
        made = partial(
            broadcast_groups_for_load, me=exchange.rank, timeout=timedelta(seconds=config.current().group_timeout)
        )
        with made(new, over_hosts) as groups, made(new_on_devices, on_devices, backend=backend) as device_groups:
            yield groups, device_groups

    def _read(self, plan: LoadPlan, groups: tuple[_Groups, _Groups], rank: int, metadata: Metadata) -> None:
        final, failure = plan, None
        with contextlib.ExitStack() as shown, stage("execute_read"):
            try:
                shown.enter_context(progress.bar("load", lambda: _bytes_to_read(plan, metadata, rank)))
                final = self._planner.finalize_plan(plan)
            except Exception as error:
                if not plan.shared:
                    raise
                failure = error  # others wait for what this rank was to send
            if plan.shared:
                read_and_broadcast(
                    plan,
                    reader=self._reader,
                    planner=self._planner,
                    groups=groups[0],
                    device_groups=groups[1],
                    me=rank,
                    batch_bytes=self._sharing.batch_bytes,
                    failure=failure,
                )
                final = _without(final, plan)
            self._reader.execute_read(final, self._planner)


def _bytes_to_read(plan: LoadPlan, metadata: Metadata, me: int) -> int:
    """Stored bytes that rank `me` reads itself: what it does not share, and what it reads for others."""
    items, shared = plan.item_columns, plan.shared_columns
    alone = ~np.isin(items.boxes.entry, shared.boxes.entry)
    rows = items.storage_row[alone]
    elements = np.maximum(metadata.chunks.take(rows).volumes(), 1)
    own = items.boxes.volumes()[alone] * metadata.storage.length[rows] // elements
    itemsizes = np.array([itemsize_of(name) for name in shared.dtype_names], dtype=np.int64)
    sent = shared.boxes.volumes() * itemsizes[shared.stored_dtype]
    return int(own.sum() + sent[shared.source == me].sum())


def _without(final: LoadPlan, shared: LoadPlan) -> LoadPlan:
    """What is still to be read of `final` once all that is shared according to `shared` is there."""
    filled = shared.shared_columns.boxes.entry
    if final.item_columns is shared.item_columns:
        rest = ~np.isin(shared.item_columns.boxes.entry, filled)
        return LoadPlan.build(final.items_at(np.flatnonzero(rest)))
    indexes = {shared.indexes[row] for row in set(filled.tolist())}
    return LoadPlan.build([item for item in final.items if item.dest_index not in indexes])
