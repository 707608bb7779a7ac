"""The one path every load takes: read the metadata once, plan, check, read what is shared once and the rest each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, Final

import numpy as np

from hpdcp._base import config, progress
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    IncompleteCheckpointError,
    LoadMismatchError,
    MissingKeysError,
)
from hpdcp._base.timing import stage, timed
from hpdcp._broadcast.decision import decide_broadcasts
from hpdcp._broadcast.groups import ProcessGroups, open_groups
from hpdcp._broadcast.terms import BroadcastDecision, BroadcastOptions, BroadcastRequest
from hpdcp._broadcast.walk import BroadcastContext, read_and_broadcast
from hpdcp._comm.exchange import Alone, Exchange
from hpdcp._comm.process_group import ProcessGroupExchange
from hpdcp._devices.streams import after_the_caller
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.planner import LoadPlanner, PlannerContext
from hpdcp._plan.storage import RankMetadata, StorageReader
from hpdcp._state.dtypes import itemsize_of

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
    broadcasts: Callable[[], BroadcastOptions] = BroadcastOptions,
) -> None:
    """Fill `state_dict` in place from the checkpoint of a reader, on all ranks of `exchange`.

    `open_reader` and `broadcasts` run where a failure reaches all ranks.

    Where there is no global metadata but ranks saved each for itself, each rank reads for itself as well.
    """
    load = _Load(state_dict, open_reader, planner, exchange, broadcasts)
    if isinstance(exchange, Alone):
        load.check_arguments()
    try:
        load.run()
    except CheckpointReplacedError:
        # All ranks are told of it in the same step, so all of them start again or none.
        if load.reading:
            raise
        load.run()


class _Load:
    def __init__(
        self,
        state_dict: Mapping[Any, Any],
        open_reader: Callable[[], StorageReader],
        planner: LoadPlanner,
        exchange: Exchange,
        broadcasts: Callable[[], BroadcastOptions],
    ) -> None:
        self._state_dict = state_dict
        self._open_reader = open_reader
        self._planner = planner
        self._exchange = exchange
        self._make_broadcast_options = broadcasts
        self.reading = False
        """Whether targets may have been changed."""

    @cached_property
    def _reader(self) -> StorageReader:
        return self._open_reader()

    @cached_property
    def _broadcast_options(self) -> BroadcastOptions:
        return self._make_broadcast_options()

    def check_arguments(self) -> None:
        """Raise what is wrong with them before anything is read."""
        _ = self._broadcast_options

    def run(self) -> None:
        metadata, by_rank = find_metadata(lambda: self._reader, self._exchange)
        if metadata is not None:
            self._load_from(metadata, self._exchange)
            return
        assert by_rank is not None
        alone = Alone(self._exchange.rank, self._exchange.world_size)
        own = by_rank.own(self._exchange.world_size)
        if own is None or not self._covered_by(own, alone):
            self._load_from(by_rank.merged(), alone)

    def _covered_by(self, own: Metadata, alone: Exchange) -> bool:
        """Whether this rank's own record was enough, so that it is loaded."""
        try:
            return self._load_from(own, alone, only_if_complete=True)
        except LoadMismatchError:
            return False

    def _load_from(self, metadata: Metadata, exchange: Exchange, *, only_if_complete: bool = False) -> bool:
        plan = self._planned(metadata, exchange)
        if only_if_complete and not self._planner.complete:
            return False
        self.reading = True
        with after_the_caller(), self._groups(plan, exchange) as groups:
            exchange.agree(_READING, lambda: self._read(plan, groups, exchange.rank, metadata))
        exchange.agree("finishing the load", self._planner.finish_load)
        return True

    def _planned(self, metadata: Metadata, exchange: Exchange) -> LoadPlan:
        """What this rank reads: every rank plans for itself, and the coordinator decides who reads for others."""
        collective = not isinstance(exchange, Alone)
        context = PlannerContext(
            exchange.rank, exchange.world_size, exchange.is_coordinator, collective, self._reader.allow_pickle
        )
        local: list[LoadPlan] = []

        def plan_locally() -> bytes:
            progress.check()
            self._planner.configure_planner(self._state_dict, metadata, context)
            self._reader.configure_reader(metadata, context)
            with stage("build_local_plan"):
                plan = self._reader.optimize_local_plan(self._local_plan())
            request = self._broadcast_options.request(shares_page_cache=self._reader.shares_page_cache)
            local.append(plan.with_broadcast_terms(request.to_bytes()))
            return local[0].to_bytes()

        def plan_globally(answers: list[bytes]) -> list[bytes]:
            local_plans = [LoadPlan.from_bytes(answer) for answer in answers]
            with stage("build_global_plan"):
                plans = self._reader.optimize_global_plan(self._planner.build_global_plan(local_plans))
                if collective:
                    requests = [BroadcastRequest.from_bytes(plan.broadcast_terms) for plan in local_plans]
                    plans = decide_broadcasts(plans, requests, metadata)
            return [plan.to_part(mine) for plan, mine in zip(plans, local_plans, strict=True)]

        with stage("all_gather_object"):
            part = exchange.gather_scatter("planning the load", plan_locally, plan_globally)
        return LoadPlan.from_part(part, local[0])

    def _local_plan(self) -> LoadPlan:
        """The planner's; what does not fit raises with what else the reader advises."""
        try:
            return self._planner.build_local_plan()
        except LoadMismatchError as error:
            advice = self._reader.mismatch_advice
            # Names may be among several kinds of mismatch; in an error of any other one kind they are not.
            if not advice or type(error) not in (MissingKeysError, LoadMismatchError):
                raise
            raise type(error)(f"{error} {advice}") from None

    @contextlib.contextmanager
    def _groups(self, plan: LoadPlan, exchange: Exchange) -> Iterator[ProcessGroups]:
        if not isinstance(exchange, ProcessGroupExchange):
            yield ProcessGroups()
            return
        decision = BroadcastDecision.from_bytes(plan.broadcast_terms)
        timeout = timedelta(seconds=config.current().group_timeout)
        if decision.new_groups or decision.new_device_groups:
            # Who makes a group waits for all others without hearing of one that has died: none has, until here.
            exchange.agree("making process groups", lambda: None)
        with open_groups(decision, self._broadcast_options, exchange.group, timeout=timeout) as groups:
            yield groups

    def _read(self, plan: LoadPlan, groups: ProcessGroups, rank: int, metadata: Metadata) -> None:
        """What is shared first, in the walk that no rank may leave; then the rest."""
        final: LoadPlan = plan
        failure: BaseException | None = None
        with contextlib.ExitStack() as shown, stage("execute_read"):
            try:
                shown.enter_context(progress.bar("load", lambda: _bytes_to_read(plan, metadata, rank)))
                final = self._planner.finalize_plan(plan)
            except BaseException as error:
                if not plan.shared:
                    raise
                failure = error  # others wait for what this rank was to send
            if plan.shared:
                batch_bytes = self._broadcast_options.batch_bytes
                context = BroadcastContext(rank, self._reader, self._planner, groups, batch_bytes)
                read_and_broadcast(plan, context, failure=failure)
                final = final.without_shared(plan)
            self._reader.execute_read(final, self._planner)


def _bytes_to_read(plan: LoadPlan, metadata: Metadata, rank: int) -> int:
    """Stored bytes that `rank` reads itself: what it does not share, and what it reads for others."""
    items, shared = plan.item_columns, plan.shared_columns
    alone = ~np.isin(items.boxes.entry, shared.boxes.entry)
    rows = items.storage_row[alone]
    elements = np.maximum(metadata.chunks.take(rows).volumes(), 1)
    own = items.boxes.volumes()[alone] * metadata.storage.length[rows] // elements
    itemsizes = np.array([itemsize_of(name) for name in shared.dtype_names], dtype=np.int64)
    sent = shared.boxes.volumes() * itemsizes[shared.stored_dtype]
    return int(own.sum() + sent[shared.reader_rank == rank].sum())


def _refuse_two_saves(seen: RankMetadata | None, expected: str, exchange: Exchange) -> None:
    """Raise where ranks would load from two saves, or could not tell whether they do."""
    if seen is not None and seen.save_id != expected:
        raise IncompleteCheckpointError(
            f"rank {exchange.rank} found another save than the coordinator did: ranks save there just now. Wait until "
            "that save has ended on all ranks, and load again."
        )
    if seen is not None and seen.superseded and isinstance(exchange, Alone) and exchange.world_size > 1:
        raise IncompleteCheckpointError(
            "the checkpoint is not one whole save: a later one has begun to replace it and has not ended on all ranks. "
            "Wait for it on all ranks; or, if it was killed, load with use_collectives=True: all ranks then take the "
            "one before it."
        )


def find_metadata(
    reader: Callable[[], StorageReader], exchange: Exchange
) -> tuple[Metadata | None, RankMetadata | None]:
    """The global metadata, or else the ranks' own. The coordinator looks once, and all take its answer."""
    found: list[Metadata] = []

    def look() -> bytes:
        try:
            metadata = reader().load_metadata()
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            seen = reader().load_rank_metadata(exchange.rank)
            if seen is None:
                raise
            return _BY_RANK + seen.save_id.encode()
        if metadata.encoded is not None:
            found.append(metadata)
            return _GLOBAL if isinstance(exchange, Alone) else _GLOBAL + metadata.encoded
        # Made up of what something else wrote: parsed by all ranks alike, which checks it as well.
        return _GLOBAL + metadata.to_bytes()

    with stage("load_metadata"):
        answer = exchange.broadcast("reading the metadata", look)
    if answer[:1] == _BY_RANK:

        def look_alike() -> RankMetadata | None:
            seen = reader().load_rank_metadata(exchange.rank)
            _refuse_two_saves(seen, answer[1:].decode(), exchange)
            return seen

        return None, exchange.agree("reading the ranks' metadata", look_alike)
    if found:
        return found[0], None
    return Metadata.from_bytes(memoryview(answer)[1:], where="the checkpoint's metadata"), None
