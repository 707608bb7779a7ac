"""The one path every load takes: read the metadata once, plan, check, read each its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final

from hpdcp.collectives import Alone, Exchange
from hpdcp.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    IncompleteCheckpointError,
    LoadMismatchError,
)
from hpdcp.metadata import Metadata
from hpdcp.planner import LoadPlan, LoadPlanner, PlannerContext
from hpdcp.storage import RankMetadata, StorageReader
from hpdcp.timing import stage, timed

_GLOBAL: Final = b"G"
_BY_RANK: Final = b"R"


@timed("_load_impl")
def load_state(
    state_dict: Mapping[Any, Any], *, open_reader: Callable[[], StorageReader], planner: LoadPlanner, exchange: Exchange
) -> None:
    """Fill `state_dict` in place from the checkpoint of a reader, on all ranks of `exchange`.

    `open_reader` runs where a failure reaches all ranks.

    Where there is no global metadata but ranks saved each for itself, each rank reads for itself as well.
    """
    load = _Load(state_dict, open_reader, planner, exchange)
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
        answer = exchange.announce("reading the metadata", look)
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
    ) -> None:
        self._state_dict = state_dict
        self._open_reader = open_reader
        self._planner = planner
        self._exchange = exchange
        self.reading = False
        """Whether targets may have been changed."""

    @cached_property
    def _reader(self) -> StorageReader:
        return self._open_reader()

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
            self._planner.configure_planner(self._state_dict, metadata, context)
            self._reader.configure_reader(metadata, context)
            with stage("build_local_plan"):
                return self._reader.optimize_local_plan(self._planner.build_local_plan()).to_bytes()

        with stage("all_gather_object"):
            part = exchange.plan("planning the load", plan_locally, self._plan_globally)
        if only_if_complete and not self._planner.complete:
            return False
        self.reading = True
        exchange.agree("reading", lambda: self._read(part))
        exchange.agree("finishing the load", self._planner.finish_load)
        return True

    def _plan_globally(self, parts: list[bytes]) -> list[bytes]:
        with stage("build_global_plan"):
            plans = self._planner.build_global_plan([LoadPlan.from_bytes(part) for part in parts])
            return [plan.to_bytes() for plan in self._reader.optimize_global_plan(plans)]

    def _read(self, part: bytes) -> None:
        plan = self._planner.finalize_plan(LoadPlan.from_bytes(part))
        with stage("execute_read"):
            self._reader.execute_read(plan, self._planner)
