"""The saves of a run, one after the other: how each went, as all ranks agree, and when failures are too many."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from hpdcp._background.response import AsyncSaveResponse
from hpdcp._base.arguments import require_count
from hpdcp._base.errors import (
    CheckpointError,
    InvalidArgumentError,
    RankFailedError,
    StorageError,
    WaitTimeoutError,
    WorkerDiedError,
)
from hpdcp._base.timing import log_message
from hpdcp._comm.exchange import Exchange
from hpdcp._format.metadata import Metadata

_PASSING: Final = (StorageError, CheckpointError, RankFailedError, WaitTimeoutError, WorkerDiedError)
"""What a job can live with: the next save may succeed. Whatever is wrong with the state itself is raised at once."""
_WELL, _PASSED, _FATAL = range(3)


class RunSaves:
    """What became of the last save, and how many failed in a row.

    Args:
        on_failure: "raise", or "warn" for up to `most` failures in a row.
    """

    def __init__(self, on_failure: str, most: int) -> None:
        if on_failure not in ("raise", "warn"):
            raise InvalidArgumentError(f"on_failure is {on_failure!r}; expected 'raise' or 'warn'.")
        require_count("max_failures", most)
        self._most = most if on_failure == "warn" else 0
        self._in_a_row = 0
        self._last: tuple[int, AsyncSaveResponse] | None = None
        self._told = threading.Event()
        """Set once what follows the last save has been begun, or its failure logged."""

    @property
    def pass_over(self) -> bool:
        """Whether failures may be passed over."""
        return self._most > 0

    @property
    def in_flight(self) -> int | None:
        """The step that is being saved."""
        return None if self._last is None or self._last[1].done() else self._last[0]

    def begin(self, step: int, response: AsyncSaveResponse, saved: Callable[[], object]) -> None:
        """`response` is how step `step` is saved; `saved` is called once it is, and a failure logged once it fails."""
        self._last = step, response
        told = self._told = threading.Event()

        def done(future: Future[Metadata]) -> None:
            try:
                error = future.exception()  # so that somebody has asked
                if error is None:
                    saved()
                else:
                    log_message(logging.WARNING, f"step {step} was not saved: {type(error).__name__}: {error}")
            finally:
                told.set()

        response.future.add_done_callback(done)

    def wait(self) -> BaseException | None:
        """Wait until nothing is in flight; why the last save failed."""
        if self._last is None:
            return None
        self._told.wait()
        return self._last[1].future.exception()

    def settle(self, exchange: Exchange, step: int | None, ready: Callable[[], object] = lambda: None) -> None:
        """On all ranks, before step `step` is saved, or at the end: what becomes of a save that failed.

        Args:
            ready: what each rank does first, where a failure reaches all ranks.

        Raises:
            HpdcpError: on all ranks, with the cause on each that has one: it failed, and is not to be passed over.
            InvalidArgumentError: ranks are about to save different steps.
        """
        error: BaseException | None = None

        def mine() -> list[int]:
            nonlocal error
            ready()
            error = self.wait()
            kind = _WELL if error is None else _PASSED if isinstance(error, _PASSING) else _FATAL
            return [kind, 0 if step is None else step + 1]

        least, most = exchange.min_max("saving a step of the run", 2, mine)
        failed, self._last = self._last, None
        if least[1] != most[1]:
            raise InvalidArgumentError(
                f"one rank saves step {least[1] - 1} and another step {most[1] - 1}: all ranks have to save the same."
            )
        if most[0] == _WELL:
            self._in_a_row = 0 if failed is not None else self._in_a_row
            return
        self._in_a_row += 1
        if most[0] == _PASSED and self._in_a_row <= self._most:
            return
        if error is None:
            name = "the last save" if failed is None else f"step {failed[0]}"
            raise RankFailedError(f"{name} was not saved on another rank, whose output says why.")
        if self._in_a_row > 1:
            error.add_note(f"{self._in_a_row} saves of this run have failed in a row.")
        raise error


def finished(location: str, save: Callable[[], Metadata], *, pass_over: bool) -> AsyncSaveResponse:
    """The response of a save that is made now, in the call; `pass_over`: also where it fails, if others need not."""
    response = AsyncSaveResponse(location)
    try:
        response.future.set_result(save())
    except _PASSING as error:
        if not pass_over:
            raise
        response.future.set_exception(error)
    return response
