"""How the workers of all ranks reach one another: a gloo group of their own, the storage, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hpdcp._background._save_job import Coordination, SaveJob
from hpdcp._base import config
from hpdcp._base.errors import PeerLostError
from hpdcp._comm import mailbox
from hpdcp._comm.exchange import Alone, Exchange
from hpdcp._comm.process_group import ProcessGroupExchange, hang_up
from hpdcp._files.publish import read_or_none
from hpdcp._format.file_names import METADATA, rank_metadata_key
from hpdcp._format.metadata import Metadata
from hpdcp._plan.storage import StorageWriter

_STORE_SECONDS: Final = 0.005
"""Between two looks at the store."""
_STOP_MEETING_SECONDS: Final = 0.5
"""What waits for other workers looks more often than this whether it should stop."""
_GAVE_UP: Final = 4
"""Exit status of a worker that could not stop waiting for others."""
_REPORT_SECONDS: Final = 10
"""How long a trainer tries to reach the store to say that its worker died."""
_DEAD: Final = "dead"
"""In the store, under `_meeting_key`: the rank whose worker died before it came to the others."""


class OtherRanks:
    """What this worker's trainer has heard of other ranks while a save is going on; told and asked on two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[str, str] = {}
        self._meeting = ""
        """The attempt whose workers are building their group."""
        self._group: dist.ProcessGroup | None = None

    def heard(self, attempt: str) -> str:
        """Why another rank will not come to the end of the attempt; empty where nothing is known."""
        return self._heard.get(attempt, "")

    def give_up(self, attempt: str, reason: str) -> None:
        """End what waits for them."""
        with self._lock:
            self._heard = {attempt: reason}
            if self._group is not None:
                hang_up(self._group)
        time.sleep(_STOP_MEETING_SECONDS)
        if self._meeting == attempt:
            # Neither torch nor gloo lets go of a group that is being built, or of a store that does not answer.
            os._exit(_GAVE_UP)

    @contextlib.contextmanager
    def to_meet(self, attempt: str) -> Iterator[None]:
        """While the attempt's workers build their group, giving up ends this process."""
        self._meeting = attempt
        try:
            yield
        finally:
            self._meeting = ""

    @contextlib.contextmanager
    def met_in(self, attempt: str, group: dist.ProcessGroup) -> Iterator[None]:
        """While the attempt's ranks wait for one another in `group`, giving up closes its connections."""
        with self._lock:
            self._group = group
            if self._heard.get(attempt):
                hang_up(group)
        try:
            yield
        finally:
            with self._lock:
                self._group = None


@contextlib.contextmanager
def open_exchange(job: SaveJob, writer: StorageWriter, group: WorkerGroup, others: OtherRanks) -> Iterator[Exchange]:
    """The exchange that the job asks for; `group` is used, and built where it must be, for gloo only.

    Raises:
        PeerLostError: some worker did not come to the gloo group in time.
    """
    if job.coordination is Coordination.GLOO:
        try:
            with others.to_meet(job.identity.attempt):
                exchange = group.exchange(job)
            with others.met_in(job.identity.attempt, exchange.group):
                yield exchange
        except PeerLostError:
            # The others wait for this rank until its connections close.
            group.abandon()
            raise
    elif job.coordination is Coordination.STORAGE:
        backend = writer.open_location()
        backend.prepare()
        messages = mailbox.Mailbox(
            backend,
            attempt=job.identity.attempt,
            rank=job.rank,
            world_size=job.world_size,
            timeout=config.current().mailbox_timeout,
            heard=lambda: others.heard(job.identity.attempt),
        )
        try:
            yield messages
        finally:
            messages.close()
    else:
        yield Alone(job.rank, job.world_size)


def report_dead_worker(job: SaveJob) -> None:
    """In the trainer: tell the other ranks' workers that this rank's died, so that they do not wait for it.

    Raises:
        HpdcpError, RuntimeError: neither storage nor store can be reached.
    """
    if job.coordination is Coordination.STORAGE:
        mailbox.report_dead_worker(job.writer.open(job.identity).open_location(), job.identity.attempt, job.rank)
    elif job.coordination is Coordination.GLOO:
        store = _open_store(job, timedelta(seconds=_REPORT_SECONDS))
        PrefixStore(_meeting_key(job.identity.attempt), store).set(_DEAD, str(job.rank))


class WorkerGroup:
    """The workers' own gloo group: built when first needed, and again whenever one of them is a new process."""

    def __init__(self, incarnation: str, others: OtherRanks) -> None:
        self._others = others
        self._incarnation = incarnation
        self._digest = ""

    def exchange(self, job: SaveJob) -> ProcessGroupExchange:
        """Over the group of all workers; waits until each of them has come to this save.

        Raises:
            PeerLostError: some did not come in time.
        """
        timeout = timedelta(seconds=config.current().mailbox_timeout)
        try:
            digest = self._agree(job, timeout)
            if digest != self._digest:
                self.leave()
                store = PrefixStore(f"hpdcp/group/{digest}", _open_store(job, timeout))
                dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout)
                self._digest = digest
        except (RuntimeError, ValueError) as error:
            raise PeerLostError(
                f"the workers of {job.world_size} ranks did not all come to this save within {timeout}: {error}. Did "
                "every rank call async_save, with the same arguments?"
            ) from error
        group = dist.group.WORLD
        assert group is not None
        return ProcessGroupExchange(group)

    def _agree(self, job: SaveJob, timeout: timedelta) -> str:
        """The same text on all ranks, another one as soon as any worker is another process."""
        store = PrefixStore(_meeting_key(job.identity.attempt), _open_store(job, timeout))
        store.set(str(job.rank), self._incarnation)
        if job.rank == 0:
            ranks = [str(rank) for rank in range(job.world_size)]
            self._wait(store, ranks, timeout, job.identity.attempt)
            all_of_them = b"".join(store.multi_get(ranks))
            store.set("group", hashlib.blake2b(all_of_them, digest_size=16).hexdigest())
            for rank in ranks:
                store.delete_key(rank)
        self._wait(store, ["group"], timeout, job.identity.attempt)
        return str(store.get("group").decode())

    def _wait(self, store: PrefixStore, keys: list[str], timeout: timedelta, attempt: str) -> None:
        """Until all keys are there; RuntimeError when a rank's worker is known to have died, or they do not come."""
        last = time.monotonic() + timeout.total_seconds()
        while not store.check(keys):
            if store.check([_DEAD]):
                raise RuntimeError(f"the background worker of rank {store.get(_DEAD).decode()} died")
            if reason := self._others.heard(attempt):
                raise RuntimeError(reason)
            if time.monotonic() > last:
                missing = [key for key in keys if not store.check([key])]
                raise RuntimeError(f"still missing are ranks {', '.join(missing[:8])} ({len(missing)} in all)")
            time.sleep(_STORE_SECONDS)

    def abandon(self) -> None:
        """Leave a group in which messages may still be under way, and have all workers build another one next time."""
        self.leave()
        self._incarnation = uuid.uuid4().hex

    def leave(self) -> None:
        """Leave the group, which closes its connections: whoever waits for this rank in it raises."""
        if self._digest:
            self._digest = ""
            dist.destroy_process_group()


def _meeting_key(attempt: str) -> str:
    """Under which the workers of one attempt meet in the store."""
    return f"hpdcp/workers/{attempt}"


def _open_store(job: SaveJob, timeout: timedelta) -> TCPStore:
    """The store that MASTER_ADDR and MASTER_PORT name; RuntimeError when nothing answers there."""
    host, port = job.master
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def published_by(job: SaveJob, writer: StorageWriter) -> Metadata | None:
    """What was published of this very save, for this rank, where only the word of it has not come through."""
    if writer.location is None:
        return None
    key = rank_metadata_key(job.rank) if job.coordination is Coordination.NONE else METADATA
    data = read_or_none(writer.open_location(), key)
    found = None if data is None else Metadata.from_bytes(data, where=f"{writer.location}/{key}")
    return found if found is not None and found.settings.get("attempt") == job.identity.attempt else None
