"""One call of `async_save` as the ranks' trainers see it: its number, what they agree on, and who has failed or died.

The calls that all ranks make are counted at the door, so that ranks meet in the store of the default process group
under the number of the call, and under nothing that they pass: that may be what differs. Nobody waits for anybody.
Workers meet only after that, and each hears from its own trainer what that hears here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from typing import Final

import torch.distributed as dist

from hpdcp._base.errors import HpdcpError, InvalidArgumentError
from hpdcp._comm.exchange import COORDINATOR
from hpdcp._comm.identity import default_store, run_id
from hpdcp._comm.process_group import closed_connections, standing_host_group

_calls: Final[dict[str, itertools.count[int]]] = {}
"""Run → this process's calls that all ranks make."""
_SILENT_SECONDS: Final = 5.0
"""A rank is taken for dead when its connection is closed and its trainer has given no sign of life for so long."""


class JointCall:
    """The next call that all ranks make; on each it must be made before anything can fail."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        run = run_id()
        self.number = next(_calls.setdefault(run, itertools.count(1)))
        self._key = f"hpdcp/call/{run}/{self.number}"
        self._store = default_store()
        self._group = standing_host_group()
        self._run = run
        self._silent: dict[int, tuple[bytes, float]] = {}
        """Rank whose connection is closed → its last sign of life, and since when there was no newer one."""

    def settle(self, location: str) -> str:
        """The attempt's id, the same on all ranks.

        Raises:
            InvalidArgumentError: another rank saves to another location.
        """
        mine = json.dumps([uuid.uuid4().hex[:16], self.rank, location])
        attempt, first, theirs = json.loads(self._store.compare_set(self._key, "", mine))
        if theirs != location:
            raise InvalidArgumentError(
                f"ranks pass different locations to async_save: rank {first} saves to {theirs}, rank {self.rank} to "
                f"{location}. Agree on one first, such as a name that rank 0 makes and broadcasts."
            )
        return str(attempt)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one's call, or its save, has failed; the first to do so is heard."""
        text = str(error) if isinstance(error, HpdcpError) else f"{type(error).__name__}: {error}"
        # A store that is gone takes those with it who would listen.
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(f"{self._key}/failed", "", json.dumps([self.rank, text]))

    def heard(self) -> str:
        """Why another rank will not come to the end of this save; empty where nothing is known.

        Whoever asks gives a sign of life by it.
        """
        with contextlib.suppress(RuntimeError):
            self._store.set(self._beat_of(self.rank), uuid.uuid4().hex)
            if self._store.check([f"{self._key}/failed"]):
                rank, text = json.loads(self._store.get(f"{self._key}/failed"))
                if rank != self.rank:
                    return f"rank {rank} failed in its call of async_save, or after it: {text}"
        dead = self._dead_ranks()
        return f"the trainer of rank {dead[0]} died" if dead else ""

    def _dead_ranks(self) -> list[int]:
        """Of those that this rank watches: all by the coordinator, which tells the others, and that by the others."""
        if self._group is None or self._group is not standing_host_group():
            return []
        watched = range(self.world_size) if self.rank == COORDINATOR else (COORDINATOR,)
        now = time.monotonic()
        for rank in closed_connections(self._group, [rank for rank in watched if rank != self.rank]):
            beat = self._last_beat(rank)
            if rank not in self._silent or self._silent[rank][0] != beat:
                self._silent[rank] = (beat, now)
        return [rank for rank, (_, since) in self._silent.items() if now - since > _SILENT_SECONDS]

    def _last_beat(self, rank: int) -> bytes:
        try:
            key = self._beat_of(rank)
            return bytes(self._store.get(key)) if self._store.check([key]) else b""
        except RuntimeError:
            return b""  # the store is gone with the process that held it

    def _beat_of(self, rank: int) -> str:
        return f"hpdcp/alive/{self._run}/{rank}"


def joint_call(*, no_dist: bool, use_collectives: bool) -> JointCall | None:
    """The next call that all ranks make; None where this rank's save is for itself."""
    if no_dist or not use_collectives or not dist.is_available() or not dist.is_initialized():
        return None
    return JointCall(dist.get_rank(), dist.get_world_size()) if dist.get_world_size() > 1 else None
