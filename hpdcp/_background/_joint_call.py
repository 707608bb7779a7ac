"""One call of `async_save` that all ranks make: its number, what they agree on, and which rank failed or died in it.

The calls that all ranks make are counted at the door, so that ranks meet in the store of the default process group
under the number of the call, and under nothing that they pass: that may be what differs. Nobody waits for anybody.
Workers meet only after that, and cannot tell a rank that is late from one that will not come; trainers can.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Iterator
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hpdcp._base.errors import InvalidArgumentError, PeerLostError
from hpdcp._comm.exchange import COORDINATOR, Failed
from hpdcp._comm.identity import default_store, own_connection, run_id
from hpdcp._comm.process_group import is_closed, standing_host_group

_calls: Final[dict[str, itertools.count[int]]] = {}
"""Run → this process's calls that all ranks make."""
_SILENT_SECONDS: Final = 3.0
"""Without a sign of life for so long, a rank's connection is looked at; while it stands, the rank is slow, not dead."""
_LOOKED_AT: Final = 100
"""Ranks that one look is for: each is a request to the store."""


class JointCall:
    """The next call that all ranks make; on each it must be made before anything can fail.

    Raises:
        PeerLostError: the store of the default process group does not answer.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # Rank 0's may be the store itself: it has to be there for the others when the process group is left early.
        self._served = default_store()
        with _store_answers():
            self._run = run_id()
            self._store: Store | None = own_connection(self._served)
        number = next(_calls.setdefault(self._run, itertools.count(1)))
        self._key = f"hpdcp/call/{self._run}/{number}"
        self._group = standing_host_group()
        watched = range(1, world_size) if rank == COORDINATOR else (COORDINATOR,)
        self._watched = itertools.cycle(watched)
        """The coordinator looks at all and tells the others; that it lives itself is for them to see."""
        self._at_once = min(_LOOKED_AT, len(watched))
        self._signs: dict[int, tuple[int, float]] = {}
        """Rank → its last sign of life, and since when there was no newer one."""
        self.number = number

    def settle(self, location: str, use_gloo: bool) -> str:
        """The attempt's id, the same on all ranks.

        Raises:
            InvalidArgumentError: another rank saves to another location, or coordinates in another way.
            PeerLostError: the store does not answer any more.
        """
        mine = json.dumps([uuid.uuid4().hex[:16], self.rank, location, use_gloo])
        with _store_answers():
            assert self._store is not None
            attempt, first, *theirs = json.loads(self._store.compare_set(self._key, "", mine))
        for what, there, here in zip(("locations", "use_gloo="), theirs, (location, use_gloo), strict=True):
            if there != here:
                raise InvalidArgumentError(
                    f"ranks pass different {what} to async_save: rank {first} passes {there}, rank {self.rank} "
                    f"{here}. Agree first, as by a name that rank 0 makes and broadcasts; if one rank has made a call "
                    "less than the others, restart the job."
                )
        return str(attempt)

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one's call, or its save, has failed; the first that says something is heard."""
        self._note(Failed.of(self.rank, error))

    def heard(self) -> Failed | None:
        """What a rank failed of, so that this save cannot succeed; None while nothing is known.

        It may be this rank, whose call failed while its worker waits for the others'. To be asked every second, which
        is a sign of life as well.
        """
        if self._store is not None:
            try:
                self._store.add(self._sign_of(self.rank), 1)
                if self._store.check([f"{self._key}/failed"]):
                    return Failed.from_json(json.loads(self._store.get(f"{self._key}/failed")))
            except RuntimeError:
                self._store = None  # gone with the process that held it; every further try would write to stderr
        return self._dead()

    def _dead(self) -> Failed | None:
        if self._group is None or self._group is not standing_host_group():
            return None  # this rank itself has left the group
        now = time.monotonic()
        for rank in itertools.islice(self._watched, self._at_once):
            sign = self._last_sign(rank)
            last, since = self._signs.setdefault(rank, (sign, now))
            if sign != last:
                self._signs[rank] = (sign, now)
            elif now - since >= _SILENT_SECONDS and is_closed(self._group, rank):
                dead = Failed.of(rank, PeerLostError("its training process died. Look at its output for the error."))
                self._note(dead)
                return dead
        return None

    def _note(self, failed: Failed) -> None:
        if self._store is not None:
            # A store that is gone takes those with it who would read this.
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(f"{self._key}/failed", "", json.dumps(failed.to_json()))

    def _last_sign(self, rank: int) -> int:
        try:
            return 0 if self._store is None else self._store.add(self._sign_of(rank), 0)
        except RuntimeError:
            self._store = None
            return 0

    def _sign_of(self, rank: int) -> str:
        return f"hpdcp/alive/{self._run}/{rank}"


def joint_call(*, no_dist: bool, use_collectives: bool) -> JointCall | None:
    """The next call that all ranks make; None where this rank's save is for itself."""
    if no_dist or not use_collectives or not dist.is_available() or not dist.is_initialized():
        return None
    return JointCall(dist.get_rank(), dist.get_world_size()) if dist.get_world_size() > 1 else None


@contextlib.contextmanager
def _store_answers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"the store of the default process group does not answer ({error}). The process that holds it, rank 0 or "
            "torchrun, died; look at its output for the first error."
        ) from error
