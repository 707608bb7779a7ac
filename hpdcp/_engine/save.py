"""The one path every save takes: plan together, write each its own, commit once."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpdcp._base import config, progress
from hpdcp._base.config import ReplicaCheck
from hpdcp._base.errors import CommitUncertainError, HpdcpError, PeerLostError
from hpdcp._base.timing import log_message, stage, timed
from hpdcp._comm.exchange import Alone, Exchange
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._format.checksums import block_checksums
from hpdcp._format.columns import EntryKind
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import Metadata
from hpdcp._plan.plan_cache import PLANS, CachedPlan
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.replicas import ReplicaReport, check_left_out, check_replicas, left_to_others
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.storage import StorageWriter
from hpdcp._plan.whole_plan import WholePlan, held_boxes, join_results
from hpdcp._plan.write_results import WriteResults
from hpdcp._state.objects import is_pickled

_ID_BYTES: Final = 8
_NEVER_AGAIN: Final = 0
"""Instead of a plan's id: this plan is good for one save only."""


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
    save.plan()
    return save.write_and_commit()


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
        self._key: Hashable | None = None
        self._found: list[CachedPlan] = []
        self._cached: CachedPlan | None = None
        self._to_cache = False

    def plan(self) -> None:
        self._cached = self._agreed_plan()
        if self._cached is not None:
            self._decided = self._exchange.broadcast("starting the save", self._begin_as_cached)
            if self._decided:
                log_message(logging.INFO, "Hit final plan and metadata cache.")
                return
        self._cached = None
        with stage("all_gather_object"):
            self._answer = self._exchange.gather_scatter("planning the save", self._plan_locally, self._plan_globally)

    def _own_part(self) -> SavePlan:
        if self._cached is not None:
            part = SavePlan.from_part(self._cached.part, self._local_plan)
            return part.with_storage_data(json.loads(self._decided))
        self._plan_id = int.from_bytes(self._answer[:_ID_BYTES], "little")
        return SavePlan.from_part(memoryview(self._answer)[_ID_BYTES:], self._local_plan)

    def _agreed_plan(self) -> CachedPlan | None:
        """An earlier plan that is right for this save on every rank; None on every rank when there is none."""
        least, most = self._exchange.min_max("starting the save", 3, self._look_up)
        if not least[0] or least[2] != most[2]:
            return None
        agreed = {most[1]}
        if least[1] != most[1]:
            # Some rank's part is the same in several saves, and it could not know which of these this one is.
            ids = (least[1], most[1])
            known = {plan.plan_id for plan in self._found}
            everywhere, _ = self._exchange.min_max(
                "starting the save", 2, lambda: [int(number in known) for number in ids]
            )
            agreed = {number for number, held in zip(ids, everywhere, strict=True) if held}
        return next((plan for plan in self._found if plan.plan_id == min(agreed, default=_NEVER_AGAIN)), None)

    def _look_up(self) -> tuple[int, int, int]:
        """This rank's vote: whether it has a plan, which one it used last, and the place it saves to."""
        settings = config.current()
        progress.check(settings.progress)
        self._check = settings.check_replicas
        self._writer = self._open_writer()
        self._writer.configure_writer(self._context)
        self._planner.configure_planner(self._state_dict, self._context)
        key = self._planner.cache_key() if self._context.collective else None
        if key is None:
            return 0, 0, 0
        self._key = plan_key(self._writer, self._planner, key)
        self._found = PLANS.find(self._key)
        if not self._found:
            return 0, 0, 0
        # Under one key the local plans are all the same.
        planned = SavePlan.from_bytes(self._found[0].local)
        self._local_plan = self._writer.optimize_local_plan(planned)
        if not self._local_plan.has_items_of(planned):
            return 0, 0, 0
        place = json.dumps(dict(self._local_plan.storage_data), sort_keys=True).encode()
        digest = hashlib.blake2b(place, digest_size=_ID_BYTES).digest()
        return 1, self._found[0].plan_id, int.from_bytes(digest, "little") >> 1

    def _begin_as_cached(self) -> bytes:
        """What the writer tells all ranks of this save; nothing when it would have them write other than planned."""
        assert self._cached is not None
        assert self._cached.whole is not None
        whole = WholePlan.from_bytes(self._cached.whole)
        plans = whole.plans(self._local_plan.storage_data)
        final = self._writer.optimize_global_plan(plans)
        if not _told_alike(plans, final):
            return b""
        self._whole = whole
        return json.dumps(dict(final[0].storage_data)).encode()

    def _plan_locally(self) -> bytes:
        with stage("build_local_plan"):
            planned = self._planner.build_local_plan()
            self._local_plan = self._writer.optimize_local_plan(planned)
        # Asked again: a staged state of which only a part is there plans that part, for this once.
        self._to_cache = self._local_plan.has_items_of(planned) and self._planner.cache_key() is not None
        left_out = self._planner.left_out()
        rest = b"" if left_out is None else left_out.to_part(self._local_plan)
        return _join(self._local_plan.to_bytes(), rest, cache="1" if self._to_cache else "0")

    def _plan_globally(self, parts: list[bytes]) -> list[bytes]:
        opened = [_part(part) for part in parts]
        locals_ = [SavePlan.from_bytes(plan) for plan, _, _ in opened]
        lefts = [
            SavePlan.from_part(rest, local) if rest else None
            for local, (_, rest, _) in zip(locals_, opened, strict=True)
        ]
        with stage("build_global_plan"):
            planned, metadata = self._planner.build_global_plan(locals_)
            plans, metadata = self._writer.arrange_global_plan(planned, metadata, locals_)
            final = self._writer.optimize_global_plan(plans)
            self._whole = WholePlan.of(metadata, final, locals_)
            check_left_out(metadata, lefts)
        # All ranks keep it or none does: ranks that know different plans would plan in full for ever.
        cache = all(settings["cache"] == "1" for _, _, settings in opened) and _told_alike(plans, final)
        plan_id = _draw() if cache else _NEVER_AGAIN
        prefix = plan_id.to_bytes(_ID_BYTES, "little")
        return [prefix + plan.to_part(local) for plan, local in zip(final, locals_, strict=True)]

    def write_and_commit(self) -> Metadata:
        try:
            if self._writer.hands_over:
                self._exchange.agree("handing over what other ranks write", self._hand_over)
            published = self._exchange.gather_broadcast("saving", self._write, self._commit)
        except Exception as error:
            if not _may_be_published(error):
                self._discard(error)
            raise
        self._remember()
        return Metadata.from_bytes(published, where="the metadata of this save")

    def _discard(self, error: Exception) -> None:
        try:
            self._writer.discard()
        except HpdcpError as left:
            error.add_note(f"What this rank had written could not be removed: {left}")

    def _remember(self) -> None:
        """Keep the plan for the next save, now that this one is known to be published."""
        if self._key is not None and self._cached is not None:
            PLANS.put(self._key, self._cached)
            return
        if self._key is None or not self._to_cache or self._plan_id == _NEVER_AGAIN:
            return
        local = self._local_plan.with_storage_data({}).without_object_lengths()
        part = self._part.with_storage_data({}).without_object_lengths().to_part(self._local_plan)
        whole = self._whole.without_object_lengths().to_bytes() if self._context.is_coordinator else None
        PLANS.put(self._key, CachedPlan(self._plan_id, local.to_bytes(), part, whole))

    def _hand_over(self) -> None:
        part = self._own_part()
        if part.hand_over is not None:
            with stage("hand_over"):
                self._writer.hand_over(part, self._planner)

    def _write(self) -> bytes:
        self._part = self._own_part()
        final = self._planner.finalize_plan(self._part)
        with stage("execute_write"), progress.bar("save", lambda: int(np.maximum(final.nbytes, 0).sum())):
            results = self._execute(final)
        report = self._report_on_replicas(final)
        self._planner.finish_write()
        return _join(results.to_bytes(), report.to_bytes())

    def _execute(self, final: SavePlan) -> WriteResults:
        written = []
        together = final.put_together()
        if len(together):
            written.append((together, self._writer.execute_write(final.select(together), self._planner)))
        held = np.setdiff1d(np.arange(len(final)), together) if len(together) else None
        for rows in self._planner.waves(final if held is None else final.select(held)):
            rows = rows if held is None else held[rows]
            part = final if len(rows) == len(final) else final.select(rows)
            written.append((rows, self._writer.execute_write(part, self._planner)))
        return written[0][1] if len(written) == 1 else WriteResults.reunited(written)

    def _report_on_replicas(self, final: SavePlan) -> ReplicaReport:
        held = held_boxes(self._local_plan, final)
        alone = isinstance(self._exchange, Alone)
        candidates = [] if alone else left_to_others(held, self._local_plan, final, self._check)
        rows: list[int] = []
        checksums: list[Sequence[int]] = []
        lengths: list[int] = []
        compared = held.select(np.array(candidates, dtype=np.int64))
        for row in (candidates[number] for wave in self._planner.waves(compared) for number in wave.tolist()):
            item = held.item(row)
            if item.kind is EntryKind.OBJECT:
                data = self._planner.get_bytes(item)
                if is_pickled(data):
                    continue
                pieces = iter([memoryview(data)])
                lengths.append(len(data))
            else:
                pieces = byte_pieces(self._planner.get_tensor(item), kept=False)
                lengths.append(item.nbytes)
            rows.append(row)
            checksums.append(block_checksums(pieces))
        return ReplicaReport.build(rows, checksums, lengths)

    def _commit(self, answers: list[bytes]) -> bytes:
        pairs = [_part(answer) for answer in answers]
        results = [WriteResults.from_bytes(result) for result, _, _ in pairs]
        joined = join_results(self._whole, results)
        reports = [ReplicaReport.from_bytes(report) for _, report, _ in pairs]
        check_replicas(self._whole, joined.as_items().table, reports)
        with stage("finalize_checkpoint"):
            metadata = self._whole.metadata.with_storage(joined.table, {})
            return self._writer.finalize_checkpoint(metadata, results).to_bytes()


def _may_be_published(error: Exception) -> bool:
    """Whether what was written may be part of a checkpoint all the same: the coordinator may have published before it
    was lost. An error with causes is one that the coordinator told, in place of publishing."""
    return isinstance(error, CommitUncertainError) or (isinstance(error, PeerLostError) and not error.causes)


def _draw() -> int:
    """A number that nobody else draws: at least 1, below 2**63."""
    return secrets.randbelow((1 << 63) - 1) + 1


def plan_key(writer: StorageWriter, planner: SavePlanner, key: Hashable) -> Hashable:
    """Under which name `PLANS` holds plans that `writer` executes and `planner` has `key` for."""
    return _class_name(writer), _class_name(planner), key


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _told_alike(planned: Sequence[SavePlan], final: Sequence[SavePlan]) -> bool:
    """Whether the writer changed nothing of the plans but what it tells all ranks alike: then they may be reused."""
    return len(planned) == len(final) and all(
        plan.has_items_of(before) and plan.storage_data == final[0].storage_data
        for plan, before in zip(final, planned, strict=True)
    )


def _join(first: bytes, second: bytes, **settings: str) -> bytes:
    columns = {"first": np.frombuffer(first, dtype=np.uint8), "second": np.frombuffer(second, dtype=np.uint8)}
    return pack_columns(columns, settings)


def _part(answer: bytes) -> tuple[bytes, bytes, Mapping[str, str]]:
    columns, settings = unpack_columns(answer, where="a rank's answer")
    return columns["first"].tobytes(), columns["second"].tobytes(), settings
