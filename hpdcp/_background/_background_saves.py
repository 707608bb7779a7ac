"""What this process has of saves in the background: one worker, at most one save in flight, failures not yet seen."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from typing import Final

from hpdcp._background._worker_client import WorkerClient
from hpdcp._background.response import AsyncSaveResponse
from hpdcp._base import saves_in_flight
from hpdcp._base.timing import log_message

_STOP_SECONDS: Final = 10.0
"""How long a worker may take to end once nothing is in flight."""


class BackgroundSaves:
    """The state of this process; `SAVES` is the only one. Whoever starts a save holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._worker: WorkerClient | None = None
        self._in_flight: tuple[AsyncSaveResponse, threading.Thread] | None = None
        self._failed: list[AsyncSaveResponse] = []

    def worker(self) -> WorkerClient:
        """A live worker, started where there is none."""
        with self.lock:
            if self._worker is not None and not self._worker.alive:
                self._worker.stop(0)
                self._worker = None
            if self._worker is None:
                self._worker = WorkerClient()
            return self._worker

    def wait_for_turn(self) -> None:
        """Return when no save is in flight."""
        if self._in_flight is None:
            return
        response, thread = self._in_flight
        began = time.monotonic()
        busy = not response.done()
        thread.join()
        self._in_flight = None
        if busy:
            waited = time.monotonic() - began
            log_message(logging.INFO, f"async_save waited {waited:.4f} seconds for the save before it to complete")

    def note_in_flight(self, response: AsyncSaveResponse, thread: threading.Thread) -> None:
        """From now on this save is in flight, until its thread ends."""
        self._in_flight = (response, thread)

    def note_failure(self, response: AsyncSaveResponse) -> None:
        """Remember that this save failed, until somebody has asked how it went."""
        self._failed.append(response)

    def raise_unseen(self) -> None:
        """Raise the error of an earlier save that failed and that nobody asked about."""
        unseen = [response for response in self._failed if not response.asked]
        self._failed = []
        for response in unseen:
            error = response.future.exception()
            assert error is not None
            raise error

    def wait(self, timeout: float | None) -> bool:
        """Whether nothing is in flight any more, after at most `timeout` seconds."""
        in_flight = self._in_flight
        if in_flight is not None:
            in_flight[1].join(timeout)
            return not in_flight[1].is_alive()
        return True

    def finish(self) -> None:
        """At exit, when nothing is in flight any more: log failures that nobody has seen, and stop the worker."""
        for response in self._failed:
            if not response.asked:
                error = response.future.exception()
                log_message(logging.ERROR, f"the save to {response.checkpoint} failed and nobody asked: {error}")
        if self._worker is not None:
            self._worker.stop(_STOP_SECONDS)
            self._worker = None

    def forget(self) -> None:
        """In a forked child, which has neither the worker nor its saves."""
        if self._worker is not None:
            self._worker.forget()
        saves_in_flight.forget()
        self.__init__()  # type: ignore[misc]


SAVES: Final = BackgroundSaves()
os.register_at_fork(after_in_child=SAVES.forget)
atexit.register(SAVES.finish)
