"""The background process that writes what a trainer staged: `python -m hpdcp._background.worker DESCRIPTOR`.

Started by `async_persist`, never by hand. It runs the same save path as `save`, sees no accelerator, and lives as long
as its trainer: the moment that is gone, however it went, this process ends where it stands. A save that was not
published by then never is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hpdcp._background._arena import Segment
from hpdcp._background._jobs import DEAD, Coordination, Job, open_store, workers_key
from hpdcp._background._link import Link, Message
from hpdcp._background._staging import StagedPlanner, StagedState
from hpdcp._background._worker_process import take_environment
from hpdcp._base import config, timing
from hpdcp._base.errors import HpdcpError, PeerLostError, StateDictError
from hpdcp._comm.exchange import Alone, Exchange
from hpdcp._comm.mailbox import Mailbox
from hpdcp._comm.process_group import ProcessGroupExchange
from hpdcp._engine.save import plan_key, save_state
from hpdcp._files.commit import read_or_none
from hpdcp._format.file_names import METADATA
from hpdcp._format.metadata import Metadata
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.standard_planner import StandardSavePlanner
from hpdcp._plan.storage import StorageWriter

_LOOK_SECONDS: Final = 0.5
_STORE_SECONDS: Final = 0.005
_GONE: Final = 3
"""Exit status of a worker whose trainer vanished."""


class Worker:
    """Takes jobs from its trainer, one after another."""

    def __init__(self, link: Link, incarnation: str) -> None:
        self._link = link
        self._group = WorkerGroup(incarnation)
        self._segments: list[Segment] = []
        self._jobs: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._replanned = False

    def run(self) -> None:
        """Until the trainer says that there is nothing more."""
        threading.Thread(target=self._receive, name="hpdcp-link", daemon=True).start()
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="hpdcp-parent", daemon=True).start()
        self._link.send("ready")
        while (message := self._jobs.get()) is not None:
            self._answer(message)
        self._group.leave()

    def _receive(self) -> None:
        while True:
            try:
                message = self._link.receive()
            except EOFError:
                os._exit(_GONE)
            if message.kind == "stop":
                self._jobs.put(None)
                return
            self._jobs.put(message)

    def _answer(self, message: Message) -> None:
        self._replanned = False
        try:
            self._take_segments(message)
            job = Job.from_message(message)
            take_environment(job.environment, job.search_path)
            # A bar in the background would draw over whatever the trainer shows by then.
            with config.using(**{**job.settings(), "progress": "never"}):
                timing.set_rank(job.rank)
                metadata, plan = self._save(job)
            published = metadata.to_bytes()
            sizes = {"metadata": len(published), "replanned": self._replanned}
            self._link.send("saved", sizes, published + plan)
        except Exception as error:  # noqa: BLE001  # whatever it is, the trainer must hear of it
            kinds = [kind.__name__ for kind in type(error).__mro__]
            text = str(error) if isinstance(error, HpdcpError) else f"{type(error).__name__}: {error}"
            trace = "".join(traceback.format_exception(error))
            facts = {"kinds": kinds, "message": text, "trace": trace, "replanned": self._replanned}
            self._link.send("failed", facts)

    def _save(self, job: Job) -> tuple[Metadata, bytes]:
        """What was published, and the plan of it where the trainer does not have that yet."""
        planner = self._planner_of(job)
        writer = job.writer.open(job.identity)
        key = plan_key(writer, planner, job.key)
        PLANS.retain(key, job.known)
        for plan in job.cached:
            PLANS.put(key, plan)
        known = {plan.plan_id for plan in PLANS.find(key)}
        try:
            with self._exchange(job, writer) as exchange:
                metadata = save_state(
                    {},
                    open_writer=lambda: writer,
                    planner=planner,
                    exchange=exchange,
                    collective=job.coordination is not Coordination.NONE,
                )
        except PeerLostError:
            published = _published(job, writer)
            if published is None:
                raise
            metadata = published
        finally:
            self._replanned = isinstance(planner, StagedPlanner) and planner.replanned
        new = [plan for plan in PLANS.find(key) if plan.plan_id not in known]
        return metadata, new[0].to_bytes() if new else b""

    def _take_segments(self, message: Message) -> None:
        self._segments += [
            Segment(descriptor, size, writable=False)
            for descriptor, size in zip(message.descriptors, message.facts["segments"], strict=True)
        ]

    def _planner_of(self, job: Job) -> SavePlanner:
        if job.plan is None:
            return _FailedPlanner(job.failure)
        planner = StagedPlanner(
            job.plan,
            job.planner.open(),
            job.key or None,
            rest=job.rest,
            fetch=self._fetch if job.staged is None else None,
            wave_bytes=job.wave_bytes,
            released=self._release if job.staged is None else lambda: None,
        )
        if job.staged is not None:
            planner.hold(job.staged, self._segments)
        return planner

    def _fetch(self, plan: SavePlan) -> tuple[StagedState, Sequence[Segment]]:
        """Have the trainer stage these items, while it waits in its call of `async_save`."""
        self._link.send("fetch", payload=plan.to_bytes())
        message = self._jobs.get()
        if message is None or message.kind != "have":
            raise StateDictError("the trainer could not stage the rest of its state: " + _reason(message))
        self._take_segments(message)
        return StagedState.from_bytes(message.payload), self._segments

    def _release(self) -> None:
        self._link.send("released")

    @contextlib.contextmanager
    def _exchange(self, job: Job, writer: StorageWriter) -> Iterator[Exchange]:
        if job.coordination is Coordination.GLOO:
            try:
                yield self._group.exchange(job)
            except PeerLostError:
                # The others wait for this rank until its connections close.
                self._group.abandon()
                raise
        elif job.coordination is Coordination.STORAGE:
            place = writer.open_place()
            place.prepare()
            mailbox = Mailbox(
                place,
                attempt=job.identity.attempt,
                rank=job.rank,
                world_size=job.world_size,
                timeout=config.current().mailbox_deadline,
            )
            try:
                yield mailbox
            finally:
                mailbox.close()
        else:
            yield Alone(job.rank, job.world_size)


class _FailedPlanner(StandardSavePlanner):
    """Stands for a state that could not be staged: all ranks must hear why."""

    def __init__(self, failure: str) -> None:
        super().__init__()
        self._failure = failure

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        raise StateDictError(self._failure)


def _published(job: Job, writer: StorageWriter) -> Metadata | None:
    """What the coordinator published of this very save, where only its last word has not come through."""
    if writer.place is None or job.coordination is Coordination.NONE:
        return None
    data = read_or_none(writer.open_place(), METADATA)
    found = None if data is None else Metadata.from_bytes(data, where=f"{writer.place}/{METADATA}")
    return found if found is not None and found.settings.get("attempt") == job.identity.attempt else None


def _reason(message: Message | None) -> str:
    return "it has ended" if message is None else str(message.facts.get("reason", ""))


class WorkerGroup:
    """The workers' own gloo group: built when first needed, and again whenever one of them is a new process."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._digest = ""

    def exchange(self, job: Job) -> Exchange:
        """Of all workers that have this attempt; waits until each of them has come to it.

        Raises:
            PeerLostError: some did not come in time.
        """
        deadline = timedelta(seconds=config.current().mailbox_deadline)
        try:
            digest = self._agree(job, deadline)
            if digest != self._digest:
                self.leave()
                store = PrefixStore(f"hpdcp/group/{digest}", self._store(job, deadline))
                dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=deadline)
                self._digest = digest
        except (RuntimeError, ValueError) as error:
            raise PeerLostError(
                f"the workers of {job.world_size} ranks did not all come to this save within {deadline}: {error}. Did "
                "every rank call async_save, with the same arguments?"
            ) from error
        group = dist.group.WORLD
        assert group is not None
        return ProcessGroupExchange(group)

    def _agree(self, job: Job, deadline: timedelta) -> str:
        """The same text on all ranks, another one as soon as any worker is another process."""
        store = PrefixStore(workers_key(job.identity.attempt), self._store(job, deadline))
        store.set(str(job.rank), self._incarnation)
        if job.rank == 0:
            ranks = [str(rank) for rank in range(job.world_size)]
            self._wait(store, ranks, deadline)
            all_of_them = b"".join(store.multi_get(ranks))
            store.set("group", hashlib.blake2b(all_of_them, digest_size=16).hexdigest())
            for rank in ranks:
                store.delete_key(rank)
        self._wait(store, ["group"], deadline)
        return str(store.get("group").decode())

    def _wait(self, store: PrefixStore, keys: list[str], deadline: timedelta) -> None:
        """Until all keys are there; RuntimeError when a rank's worker is known to have died, or they do not come."""
        last = time.monotonic() + deadline.total_seconds()
        while not store.check(keys):
            if store.check([DEAD]):
                raise RuntimeError(f"the background worker of rank {store.get(DEAD).decode()} died")
            if time.monotonic() > last:
                missing = [key for key in keys if not store.check([key])]
                raise RuntimeError(f"still missing are ranks {', '.join(missing[:8])} ({len(missing)} in all)")
            time.sleep(_STORE_SECONDS)

    def _store(self, job: Job, deadline: timedelta) -> TCPStore:
        return open_store(job.master, deadline)

    def abandon(self) -> None:
        """Leave a group in which messages may still be under way; the next is another one, for all workers."""
        self.leave()
        self._incarnation = uuid.uuid4().hex

    def leave(self) -> None:
        """Give up the group; whoever waits for this rank in it is told by the end of its connections."""
        if self._digest:
            self._digest = ""
            dist.destroy_process_group()


def _end_with_parent(parent: int) -> None:
    # The link alone would not tell while a forked child of the trainer still holds the other end.
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(_GONE)


def main(arguments: list[str]) -> None:
    """Serve the trainer at the other end of the descriptor in `arguments`."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole process group; whether to wait is for the trainer to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    Worker(Link.inherited(int(arguments[0])), arguments[1]).run()


if __name__ == "__main__":
    main(sys.argv[1:])
