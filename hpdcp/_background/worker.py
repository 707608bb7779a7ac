"""The background process that writes what a trainer staged: `python -m hpdcp._background.worker DESCRIPTOR ID`.

    receive   a job, with descriptors of the shared memory that this process does not have yet
    plan      with the workers of the other ranks, over an exchange of their own
    write     the same path as `save`, out of the shared memory
    answer    what was published, or why nothing was

Started by `async_save`, never by hand. It sees no accelerator, and lives as long as its trainer: the moment that is
gone, however it went, this process ends where it stands. A save that was not published by then never is.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from hpdcp._background._arena import Segment
from hpdcp._background._environment import ignore_signals
from hpdcp._background._messages import Message, MessageSocket
from hpdcp._background._sampled import Sampled
from hpdcp._background._save_job import Coordination, SaveAnswer, SaveJob
from hpdcp._background._staged_planner import StagedPlanner
from hpdcp._background._staging import StagedState
from hpdcp._background._worker_exchange import OtherRanks, WorkerGroup, open_exchange, published_by
from hpdcp._base import config, timing
from hpdcp._base.errors import PeerLostError, StateDictError
from hpdcp._comm.exchange import Failed
from hpdcp._engine.save import save_state
from hpdcp._format.metadata import Metadata
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.plan_key import plan_key
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.standard_save_planner import StandardSavePlanner

_LOOK_SECONDS: Final = 0.5
"""Between two looks whether the trainer is still there."""
_TRAINER_GONE: Final = 3
"""Exit status of a worker whose trainer vanished."""


class Worker:
    """Does its trainer's jobs, one after another.

    Args:
        incarnation: this process, as against any other worker that a rank has had.
    """

    def __init__(self, trainer: MessageSocket, incarnation: str) -> None:
        self._trainer = trainer
        self._others = OtherRanks()
        self._group = WorkerGroup(incarnation, self._others)
        self._segments: list[Segment] = []
        """The trainer's shared memory, as ranges count its segments."""
        self._received: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        """None after the last one."""

    def run(self) -> None:
        """Until the trainer says that there is nothing more."""
        threading.Thread(target=self._receive, name="hpdcp-receive", daemon=True).start()
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="hpdcp-parent", daemon=True).start()
        self._say("ready")
        while (message := self._received.get()) is not None:
            self._say(*self._answer(message).to_message())
        self._group.leave()

    def _say(self, kind: str, facts: Mapping[str, Any] | None = None, payload: bytes = b"") -> None:
        try:
            self._trainer.send(kind, facts, payload)
        except OSError:
            os._exit(_TRAINER_GONE)

    def _receive(self) -> None:
        """On a thread of its own: a trainer that vanishes is noticed in the midst of a save too."""
        while True:
            try:
                message = self._trainer.receive()
            except EOFError:
                os._exit(_TRAINER_GONE)
            if message.kind == "stop":
                self._received.put(None)
                return
            if message.kind == "give_up":
                self._others.give_up(message.facts["attempt"], message.facts["reason"])
                continue
            self._received.put(message)

    def _answer(self, message: Message) -> SaveAnswer:
        planner: SavePlanner | None = None
        try:
            self._add_segments(message)
            job = SaveJob.from_message(message)
            job.environment.apply()
            # A bar in the background would draw over whatever the trainer shows by then.
            with config.using(**{**job.environment.settings(), "progress": "never"}):
                timing.set_rank(job.rank)
                planner = self._planner_of(job)
                metadata, plan = self._save(job, planner)
            return SaveAnswer(_replanned(planner), metadata.to_bytes(), plan)
        except Exception as error:  # noqa: BLE001  # whatever it is, the trainer must hear of it
            return SaveAnswer(_replanned(planner), failed=Failed.of(timing.current_rank(), error))

    def _save(self, job: SaveJob, planner: SavePlanner) -> tuple[Metadata, bytes]:
        """What was published, and the plan of it where the trainer does not have that yet."""
        writer = job.writer.open(job.identity)
        collective = job.coordination is not Coordination.NONE
        context = PlannerContext(job.rank, job.world_size, job.rank == 0, collective)
        key = plan_key(writer, planner, context, config.current())
        PLANS.retain(key, job.known)
        for plan in job.cached:
            PLANS.put(key, plan)
        known = {plan.plan_id for plan in PLANS.find(key)}
        try:
            with open_exchange(job, writer, self._group, self._others) as exchange:
                metadata = save_state(
                    {},
                    open_writer=lambda: writer,
                    planner=planner,
                    exchange=exchange,
                    collective=collective,
                )
        except PeerLostError:
            published = published_by(job, writer)
            if published is None:
                raise
            metadata = published
        new = [plan for plan in PLANS.find(key) if plan.plan_id not in known]
        return metadata, new[0].to_bytes() if new else b""

    def _planner_of(self, job: SaveJob) -> SavePlanner:
        """What plans and gives out the state on behalf of the trainer's planner."""
        if job.plan is None:
            assert job.failure is not None
            return _FailedPlanner(job.failure)
        planner = StagedPlanner(
            job.plan,
            job.planner.open(),
            job.key or None,
            rest=job.rest,
            sampled=job.sampled,
            sample=self._sample if job.staged is None else None,
            fetch=self._fetch_wave if job.staged is None else None,
            wave_bytes=job.wave_bytes,
            released=self._release if job.staged is None else lambda: None,
        )
        if job.staged is not None:
            planner.hold(job.staged, self._segments)
        return planner

    def _fetch_wave(self, plan: SavePlan) -> tuple[StagedState, Sequence[Segment]]:
        """Have the trainer stage these items, while it waits in its call of `async_save`."""
        message = self._ask("stage", plan, "staged")
        self._add_segments(message)
        return StagedState.from_bytes(message.payload), self._segments

    def _sample(self, plan: SavePlan) -> Sampled:
        """Have the trainer take samples of these items, likewise."""
        return Sampled.from_bytes(self._ask("sample", plan, "sampled").payload)

    def _ask(self, kind: str, plan: SavePlan, answer: str) -> Message:
        self._say(kind, payload=plan.to_bytes())
        message = self._received.get()
        if message is None or message.kind != answer:
            reason = "it has ended" if message is None else str(message.facts.get("reason", ""))
            raise StateDictError("the trainer could not stage the rest of its state: " + reason)
        return message

    def _release(self) -> None:
        self._say("released")

    def _add_segments(self, message: Message) -> None:
        """Map the shared memory whose descriptors came with the message."""
        self._segments += [
            Segment(descriptor, size, writable=False)
            for descriptor, size in zip(message.descriptors, message.facts["segments"], strict=True)
        ]


class _FailedPlanner(StandardSavePlanner):
    """Stands for a state that could not be staged: all ranks must hear why."""

    def __init__(self, failure: Failed) -> None:
        super().__init__()
        self._failure = failure

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        raise self._failure.rebuilt(StateDictError)


def _replanned(planner: SavePlanner | None) -> bool:
    return isinstance(planner, StagedPlanner) and planner.replanned


def _end_with_parent(parent: int) -> None:
    # The socket alone would not tell while a forked child of the trainer still holds the other end.
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(_TRAINER_GONE)


def main(arguments: list[str]) -> None:
    """Serve the trainer at the other end of a socket. `arguments`: its descriptor here, this worker's incarnation."""
    ignore_signals()
    torch.set_num_threads(1)
    Worker(MessageSocket.inherited(int(arguments[0])), arguments[1]).run()


if __name__ == "__main__":
    main(sys.argv[1:])
