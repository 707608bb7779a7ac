"""The background process that writes what a trainer staged: `python -m hpdcp._worker DESCRIPTOR`.

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
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hpdcp import config, timing
from hpdcp.arena import Segment
from hpdcp.async_jobs import DEAD, Coordination, Job, open_store, workers_key
from hpdcp.collectives import Alone, Exchange, ProcessGroupExchange
from hpdcp.errors import HpdcpError, PeerLostError, StateDictError
from hpdcp.mailbox import Mailbox
from hpdcp.metadata import Metadata
from hpdcp.plan_cache import PLANS
from hpdcp.planner import PlannerContext
from hpdcp.saver import plan_key, save_state
from hpdcp.staging import StagedPlanner
from hpdcp.storage import StorageWriter
from hpdcp.worker_link import Link, Message

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
        try:
            with config.using(**message.facts["config"]):
                self._segments += [
                    Segment(descriptor, size, writable=False)
                    for descriptor, size in zip(message.descriptors, message.facts["segments"], strict=True)
                ]
                job = Job.from_message(message)
                timing.set_rank(job.rank)
                metadata, plan = self._save(job)
            published = metadata.to_bytes()
            self._link.send("saved", {"metadata": len(published)}, published + plan)
        except Exception as error:  # noqa: BLE001  # whatever it is, the trainer must hear of it
            kinds = [kind.__name__ for kind in type(error).__mro__]
            text = str(error) if isinstance(error, HpdcpError) else f"{type(error).__name__}: {error}"
            trace = "".join(traceback.format_exception(error))
            self._link.send("failed", {"kinds": kinds, "message": text, "trace": trace})

    def _save(self, job: Job) -> tuple[Metadata, bytes]:
        """What was published, and the plan of it where the trainer does not have that yet."""
        planner = _planner_of(job, self._segments)
        writer = job.writer.open(job.identity)
        key = plan_key(writer, planner, job.key)
        for plan in job.cached:
            PLANS.put(key, plan)
        known = {plan.plan_id for plan in PLANS.find(key)}
        with self._exchange(job, writer) as exchange:
            metadata = save_state(
                {},
                open_writer=lambda: writer,
                planner=planner,
                exchange=exchange,
                collective=job.coordination is not Coordination.NONE,
            )
        new = [plan for plan in PLANS.find(key) if plan.plan_id not in known]
        return metadata, new[0].to_bytes() if new else b""

    @contextlib.contextmanager
    def _exchange(self, job: Job, writer: StorageWriter) -> Iterator[Exchange]:
        if job.coordination is Coordination.GLOO:
            yield self._group.exchange(job)
        elif job.coordination is Coordination.STORAGE:
            place = writer.open_place()
            place.prepare()
            mailbox = Mailbox(
                place,
                attempt=job.identity.attempt,
                rank=job.rank,
                world_size=job.world_size,
                deadline=config.current().mailbox_deadline,
            )
            try:
                yield mailbox
            finally:
                mailbox.close()
        else:
            yield Alone(job.rank, job.world_size)


class _FailedPlanner(StagedPlanner):
    """Stands for a state that could not be staged: all ranks must hear why."""

    def __init__(self, failure: str) -> None:
        self._failure = failure

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        raise StateDictError(self._failure)


def _planner_of(job: Job, segments: Sequence[Segment]) -> StagedPlanner:
    if job.staged is None:
        return _FailedPlanner(job.failure)
    return StagedPlanner(job.staged, segments, job.planner.open(), job.key or None, partial=job.partial)


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

    def leave(self) -> None:
        """Give up the group."""
        if self._digest:
            dist.destroy_process_group()
            self._digest = ""


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
