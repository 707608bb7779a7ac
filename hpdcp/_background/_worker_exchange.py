"""How the workers of all ranks reach one another: a gloo group of their own, the storage, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
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
from hpdcp._comm.process_group import ProcessGroupExchange
from hpdcp._plan.storage import StorageWriter

_STORE_SECONDS: Final = 0.005
"""Between two looks at the store."""
_REPORT_SECONDS: Final = 10
"""How long a trainer tries to reach the store to say that its worker died."""
_DEAD: Final = "dead"
"""In the store, under `_meeting_key`: the rank whose worker died before it came to the others."""


@contextlib.contextmanager
def open_exchange(job: SaveJob, writer: StorageWriter, group: WorkerGroup) -> Iterator[Exchange]:
    """The exchange that the job asks for; `group` is used, and built where it must be, for gloo only.

    Raises:
        PeerLostError: some worker did not come to the gloo group in time.
    """
    if job.coordination is Coordination.GLOO:
        try:
            yield group.exchange(job)
        except PeerLostError:
            # The others wait for this rank until its connections close.
            group.abandon()
            raise
    elif job.coordination is Coordination.STORAGE:
        backend = writer.open_location()
        backend.prepare()
        exchange = mailbox.Mailbox(
            backend,
            attempt=job.identity.attempt,
            rank=job.rank,
            world_size=job.world_size,
            timeout=config.current().mailbox_timeout,
        )
        try:
            yield exchange
        finally:
            exchange.close()
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

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._digest = ""

    def exchange(self, job: SaveJob) -> Exchange:
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
            self._wait(store, ranks, timeout)
            all_of_them = b"".join(store.multi_get(ranks))
            store.set("group", hashlib.blake2b(all_of_them, digest_size=16).hexdigest())
            for rank in ranks:
                store.delete_key(rank)
        self._wait(store, ["group"], timeout)
        return str(store.get("group").decode())

    def _wait(self, store: PrefixStore, keys: list[str], timeout: timedelta) -> None:
        """Until all keys are there; RuntimeError when a rank's worker is known to have died, or they do not come."""
        last = time.monotonic() + timeout.total_seconds()
        while not store.check(keys):
            if store.check([_DEAD]):
                raise RuntimeError(f"the background worker of rank {store.get(_DEAD).decode()} died")
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
