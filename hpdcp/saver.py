"""The one path every save takes: plan together, write each its own, commit once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpdcp import config
from hpdcp.checkpoint_io import block_checksums, byte_pieces
from hpdcp.collectives import Alone, Exchange
from hpdcp.config import ReplicaCheck
from hpdcp.container import pack_columns, unpack_columns
from hpdcp.errors import CommitUncertainError, HpdcpError, PeerLostError
from hpdcp.metadata import Metadata
from hpdcp.objects import is_pickled
from hpdcp.planner import PlannerContext, SavePlan, SavePlanner
from hpdcp.replicas import ReplicaReport, check_replicas, rows_not_written
from hpdcp.storage import StorageWriter, WriteResults, join_results
from hpdcp.tables import EntryKind
from hpdcp.timing import stage, timed


@timed("_save_impl")
def save_state(
    state_dict: Mapping[Any, Any],
    *,
    open_writer: Callable[[], StorageWriter],
    planner: SavePlanner,
    exchange: Exchange,
    collective: bool,
) -> Metadata:
    """Save `state_dict` from all ranks of `exchange`; every rank returns the metadata once it is published.

    `open_writer` runs where a failure reaches all ranks. `collective=False`: this rank's part alone, under its own
    metadata, whatever the others do.
    """
    save = _Save(state_dict, open_writer, planner, exchange, collective)
    plan = save.plan()
    return save.write_and_commit(plan)


class _Save:
    def __init__(
        self,
        state_dict: Mapping[Any, Any],
        open_writer: Callable[[], StorageWriter],
        planner: SavePlanner,
        exchange: Exchange,
        collective: bool,
    ) -> None:
        self._state_dict = state_dict
        self._open_writer = open_writer
        self._planner = planner
        self._exchange = exchange
        self._context = PlannerContext(exchange.rank, exchange.world_size, exchange.is_coordinator, collective)
        self._check: ReplicaCheck = "off"

    def plan(self) -> SavePlan:
        with stage("all_gather_object"):
            part = self._exchange.plan("planning the save", self._plan_locally, self._plan_globally)
        return SavePlan.from_bytes(part)

    def _plan_locally(self) -> bytes:
        self._check = config.current().check_replicas
        self._writer = self._open_writer()
        self._writer.configure_writer(self._context)
        self._planner.configure_planner(self._state_dict, self._context)
        with stage("build_local_plan"):
            self._local_plan = self._writer.optimize_local_plan(self._planner.build_local_plan())
        return self._local_plan.to_bytes()

    def _plan_globally(self, parts: list[bytes]) -> list[bytes]:
        self._local_plans = [SavePlan.from_bytes(part) for part in parts]
        with stage("build_global_plan"):
            plans, self._metadata = self._planner.build_global_plan(self._local_plans)
            self._final_plans = self._writer.optimize_global_plan(plans)
        return [plan.to_bytes() for plan in self._final_plans]

    def write_and_commit(self, plan: SavePlan) -> Metadata:
        try:
            published = self._exchange.conclude("saving", lambda: self._write(plan), self._commit)
        except (PeerLostError, CommitUncertainError):
            # The coordinator may have published before it was lost: what was written may be part of a checkpoint.
            raise
        except Exception as error:
            try:
                self._writer.discard()
            except HpdcpError as left:
                error.add_note(f"What this rank had written could not be removed: {left}")
            raise
        return Metadata.from_bytes(published, where="the metadata of this save")

    def _write(self, plan: SavePlan) -> bytes:
        final = self._planner.finalize_plan(plan)
        with stage("execute_write"):
            results = self._writer.execute_write(final, self._planner)
        report = self._report_on_replicas(final)
        return _join(results.to_bytes(), report.to_bytes())

    def _report_on_replicas(self, final: SavePlan) -> ReplicaReport:
        candidates = [] if isinstance(self._exchange, Alone) else rows_not_written(self._local_plan, final, self._check)
        rows: list[int] = []
        checksums: list[Sequence[int]] = []
        for row in candidates:
            item = self._local_plan.item(row)
            if item.kind is EntryKind.OBJECT:
                data = self._planner.get_bytes(item)
                if is_pickled(data):
                    continue
                pieces = iter([memoryview(data)])
            else:
                pieces = byte_pieces(self._planner.get_tensor(item))
            rows.append(row)
            checksums.append(block_checksums(pieces))
        return ReplicaReport.build(rows, checksums, [int(self._local_plan.nbytes[row]) for row in rows])

    def _commit(self, answers: list[bytes]) -> bytes:
        pairs = [_part(answer) for answer in answers]
        results = [WriteResults.from_bytes(result) for result, _ in pairs]
        metadata = self._metadata
        metadata = metadata.with_storage(join_results(metadata, self._final_plans, results), {})
        check_replicas(metadata, self._local_plans, [ReplicaReport.from_bytes(report) for _, report in pairs])
        with stage("finalize_checkpoint"):
            return self._writer.finalize_checkpoint(metadata, results).to_bytes()


def _join(results: bytes, report: bytes) -> bytes:
    return pack_columns(
        {"results": np.frombuffer(results, dtype=np.uint8), "report": np.frombuffer(report, dtype=np.uint8)}, {}
    )


def _part(answer: bytes) -> tuple[bytes, bytes]:
    columns, _ = unpack_columns(answer, where="a rank's answer")
    return columns["results"].tobytes(), columns["report"].tobytes()
