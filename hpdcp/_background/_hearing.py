"""While a rank's save is in flight: hear what became of the other ranks, and end this rank's wait for them."""

from __future__ import annotations

import threading
from typing import Final

from hpdcp._background._joint_call import JointCall
from hpdcp._background._worker_client import WorkerClient
from hpdcp._base.errors import HpdcpError, PeerLostError
from hpdcp._comm.exchange import Failed, joint_error

_HEAR_SECONDS: Final = 1.0
"""Between two looks."""
_LAST_WORDS_SECONDS: Final = 1.5
"""A rank that has failed may have told the workers itself: they are given so long to hear it in their own way."""
_CAUSE_SECONDS: Final = 5.0
"""How long one that merely lost its peers waits to hear why: a rank whose worker died looks first what it published."""


class Hearing:
    """Asks about the other ranks, on a thread, until this rank's save has ended.

    Args:
        call: which ranks are asked about; None where there are none.
        worker: is told to wait no longer, in `attempt`.
    """

    def __init__(self, call: JointCall | None, worker: WorkerClient, attempt: str) -> None:
        self._call = call
        self._worker = worker
        self._attempt = attempt
        self._failed: Failed | None = None
        self._known = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.given_up = False
        """Whether this save cannot succeed, and the worker has been told so."""

    def start(self) -> None:
        """Idempotent."""
        if self._call is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._call,), name="hpdcp-hear", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """This rank's save has ended."""
        self._ended.set()
        if self._thread is not None:
            # Else the interpreter could end it in the midst of a call of the store, which aborts the process.
            self._thread.join(_CAUSE_SECONDS)

    def tell(self, error: BaseException) -> None:
        """Let the other ranks hear what this one's save failed of."""
        if self._call is not None:
            self._call.fail(error)

    def error(self) -> HpdcpError:
        """What some rank failed of, as it would have come by the workers' own exchange."""
        assert self._call is not None and self._failed is not None
        return joint_error("the save in the background", [self._failed], self._call.world_size)

    def cause_of(self, error: HpdcpError) -> HpdcpError:
        """What some rank failed of, where `error` says no more than that this one lost it; else `error`."""
        if not isinstance(error, PeerLostError) or self._call is None or not self._known.wait(_CAUSE_SECONDS):
            return error
        return self.error()

    def _run(self, call: JointCall) -> None:
        while not self._ended.wait(_HEAR_SECONDS):
            self._failed = call.heard()
            if self._failed is not None:
                self._known.set()
                if not self._ended.wait(_LAST_WORDS_SECONDS):
                    self.given_up = True
                    self._worker.give_up(self._attempt, str(self.error()))
                return
