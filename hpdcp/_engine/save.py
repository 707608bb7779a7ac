"""The one path every save takes: plan together, write each its own, commit once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from hpdcp._base import config, progress
from hpdcp._base.errors import CommitUncertainError, HpdcpError, PeerLostError
from hpdcp._base.timing import log_message, log_once, stage, timed
from hpdcp._comm.exchange import Alone, Exchange
from hpdcp._engine._messages import Assignment, Proposal, Report
from hpdcp._engine._plan_reuse import ONCE, agree_on_cached_plan, draw_plan_id
from hpdcp._engine._replica_checksums import replica_report
from hpdcp._format.metadata import Metadata
from hpdcp._plan.agreement import check_agreement
from hpdcp._plan.plan_cache import PLANS, CachedPlan
from hpdcp._plan.plan_key import plan_key
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.replica_checks import boxes_to_compare, check_left_out, check_replicas
from hpdcp._plan.replica_rules import ReplicaRules
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.storage import StorageWriter
from hpdcp._plan.whole_plan import WholePlan, join_results
from hpdcp._plan.write_results import WriteResults


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
    return _Save(state_dict, open_writer, planner, exchange, collective).run()


class _Save:
    """One save on one rank. After `run` the methods stand in the order in which it has them called."""

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
        self._key: Hashable | None = None
        """Under which the plan is cached; None: it is not."""
        self._cached: CachedPlan | None = None
        """The plan of an earlier save that all ranks use again."""
        self._part: SavePlan | None = None
        """What this rank writes, once it has joined."""
        self._in_doubt = False
        """Whether the save may be published from now on without this rank hearing of it."""
        self._published: Metadata | None = None
        """On the coordinator, once it is."""

    def run(self) -> Metadata:
        """Every line is a step that all ranks share: what fails on one raises on all. See `Exchange`."""
        exchange = self._exchange
        self._cached = agree_on_cached_plan(exchange, "starting the save", self._look_up)
        answer = exchange.broadcast("starting the save", self._begin_as_cached) if self._cached else b""
        if answer:
            log_message(logging.INFO, "Hit final plan and metadata cache.")
        else:
            self._cached = None
            with stage("all_gather_object"):
                answer = exchange.gather_scatter("planning the save", self._propose, self._plan_and_begin)
        self._assignment = answer
        try:
            if self._writer.redistributes:
                exchange.agree("sending what other ranks write", self._redistribute)
            published = exchange.gather_broadcast("saving", self._write, self._commit)
        except BaseException as error:
            self._discard_after(error)
            raise
        self._remember()
        if self._published is not None:
            return self._published
        return Metadata.from_bytes(published, where="the metadata of this save")

    def _look_up(self) -> tuple[Sequence[CachedPlan], bytes]:
        """This rank's plans that are right for this state, and what must be alike on all ranks for one to be used."""
        settings = config.current()
        progress.check(settings.progress)
        self._rules = ReplicaRules("off" if isinstance(self._exchange, Alone) else settings.check_replicas)
        self._writer = self._open_writer()
        self._writer.configure_writer(self._context)
        self._planner.configure_planner(self._state_dict, self._context)
        self._key = plan_key(self._writer, self._planner, self._context, settings)
        if self._key is None:
            return [], b""
        found = PLANS.find(self._key)
        if not found:
            return [], b""
        # Under one key the local plans are all the same.
        planned = SavePlan.from_bytes(found[0].local)
        self._local_plan = self._writer.optimize_local_plan(planned)
        if self._local_plan.revision != planned.revision:
            return [], b""
        alike = [dict(self._writer.agreement()), dict(self._local_plan.storage_data)]
        return found, json.dumps(alike, sort_keys=True).encode()

    def _begin_as_cached(self) -> bytes:
        """On the coordinator: begin by the cached plan; nothing where the writer would have ranks write otherwise."""
        assert self._cached is not None
        assert self._cached.whole is not None
        self._whole = WholePlan.from_bytes(self._cached.whole)
        planned = self._whole.plans(self._local_plan.storage_data)
        final = self._writer.optimize_global_plan(planned)
        if not _same_but_for_storage_data(planned, final):
            return b""
        begun = self._writer.begin(self._whole.metadata)
        return Assignment(self._cached.plan_id, final[0].to_part(planned[0]), begun).to_bytes()

    def _propose(self) -> bytes:
        """On every rank, where no earlier plan is used again: what it holds."""
        with stage("build_local_plan"):
            planned = self._planner.build_local_plan()
            self._local_plan = self._writer.optimize_local_plan(planned)
        unchanged = self._local_plan.revision == planned.revision
        # Asked again: a staged state of which only a part is there plans that part, for this once.
        cacheable = unchanged and self._planner.cache_key() is not None
        if not cacheable:
            self._key = None
        return Proposal(self._local_plan, self._planner.left_out(), cacheable, self._writer.agreement()).to_bytes()

    def _plan_and_begin(self, answers: list[bytes]) -> list[bytes]:
        """On the coordinator: who writes what."""
        proposals = [Proposal.from_bytes(answer) for answer in answers]
        check_agreement([proposal.agreement for proposal in proposals])
        locals_ = [proposal.plan for proposal in proposals]
        with stage("build_global_plan"):
            planned, metadata = self._planner.build_global_plan(locals_)
            arranged, metadata = self._writer.arrange_global_plan(planned, metadata, locals_)
            final = self._writer.optimize_global_plan(arranged)
            self._whole = WholePlan.of(metadata, final, locals_)
            check_left_out(metadata, [proposal.left_out for proposal in proposals])
        # All ranks keep it or none does: ranks that know different plans would plan in full for ever.
        keep = all(proposal.cacheable for proposal in proposals) and _same_but_for_storage_data(arranged, final)
        plan_id = draw_plan_id() if keep else ONCE
        compared = boxes_to_compare(self._whole, locals_, self._rules)
        exempt = self._rules.exempt(metadata.entries.fqns)
        if exempt is not None:
            log_once(
                logging.INFO,
                f"check_replicas = {self._rules}: {int(exempt.sum())} names may differ from rank to rank; of each the "
                "copy of the lowest rank that holds it is stored.",
            )
        begun = self._writer.begin(metadata)
        parts = (
            plan.with_compared(boxes).to_part(local)
            for plan, boxes, local in zip(final, compared, locals_, strict=True)
        )
        return [Assignment(plan_id, part, begun).to_bytes() for part in parts]

    def _join(self) -> SavePlan:
        """Take part in what the coordinator has begun; in whichever of the steps below comes first."""
        if self._part is None:
            assignment = Assignment.from_bytes(self._assignment)
            self._plan_id = assignment.plan_id
            known = self._local_plan
            if self._cached is not None:
                known = SavePlan.from_part(self._cached.part, self._local_plan)
            self._writer.join(assignment.begun)
            self._part = SavePlan.from_part(assignment.part, known)
        return self._part

    def _redistribute(self) -> None:
        part = self._join()
        if part.redistribution is not None:
            with stage("redistribute"):
                self._writer.redistribute(part, self._planner)

    def _write(self) -> bytes:
        """On every rank: store its part, and checksum what others hold too."""
        final = self._planner.finalize_plan(self._join())
        with stage("execute_write"), progress.bar("save", lambda: int(np.maximum(final.nbytes, 0).sum())):
            results = self._write_in_waves(final)
        with stage("checksum_replicas"):
            replicas = replica_report(self._planner, self._local_plan, self._join().compared)
        self._planner.finish_write()
        report = Report(results, replicas).to_bytes()
        self._in_doubt = not self._context.is_coordinator
        return report

    def _write_in_waves(self, final: SavePlan) -> WriteResults:
        """What other ranks sent, then what the planner has, as it brings it."""
        written = []
        received = final.received_rows()
        if len(received):
            written.append((received, self._writer.execute_write(final.select(received), self._planner)))
        held = np.setdiff1d(np.arange(len(final)), received) if len(received) else None
        for rows in self._planner.waves(final if held is None else final.select(held)):
            rows = rows if held is None else held[rows]
            part = final if len(rows) == len(final) else final.select(rows)
            written.append((rows, self._writer.execute_write(part, self._planner)))
        return written[0][1] if len(written) == 1 else WriteResults.reunited(written)

    def _commit(self, answers: list[bytes]) -> bytes:
        """On the coordinator, once all have written: check that what was stored is what was planned, and publish."""
        reports = [Report.from_bytes(answer) for answer in answers]
        results = [report.results for report in reports]
        joined = join_results(self._whole, results)
        check_replicas(self._whole, joined.as_items().table, [report.replicas for report in reports], self._rules)
        with stage("finalize_checkpoint"):
            metadata = self._whole.metadata.with_storage(joined.table, {})
            self._in_doubt = True
            self._published = self._writer.finalize_checkpoint(metadata, results)
        return self._published.to_bytes()

    def _discard_after(self, error: BaseException) -> None:
        """Remove what this rank has written, where it is certain that nothing was published."""
        if isinstance(error, CommitUncertainError):
            return
        # An interrupt says nothing of what has become of the save.
        if not isinstance(error, Exception) and self._in_doubt:
            return
        # The coordinator may have published before it was lost. Causes it told itself, in place of publishing.
        if isinstance(error, PeerLostError) and not error.causes:
            return
        try:
            self._writer.discard()
        except HpdcpError as left:
            error.add_note(f"What this rank had written could not be removed: {left}")

    def _remember(self) -> None:
        """Keep the plan for the next save, now that this one is known to be published."""
        if self._key is None or self._plan_id == ONCE:
            return
        if self._cached is not None:
            PLANS.put(self._key, self._cached)
            return
        assert self._part is not None
        local = self._local_plan.with_storage_data({}).without_object_lengths()
        part = self._part.with_storage_data({}).without_object_lengths().to_part(self._local_plan)
        whole = self._whole.without_object_lengths().to_bytes() if self._context.is_coordinator else None
        PLANS.put(self._key, CachedPlan(self._plan_id, local.to_bytes(), part, whole))


def _same_but_for_storage_data(planned: Sequence[SavePlan], final: Sequence[SavePlan]) -> bool:
    """Whether the writer changed nothing of the plans but what it tells all ranks alike: then they may be reused."""
    return len(planned) == len(final) and all(
        plan.revision == before.revision and plan.storage_data == final[0].storage_data
        for plan, before in zip(final, planned, strict=True)
    )
