"""Pruning behind saves: on a thread of its own, so that neither training nor the next save waits for it."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable

from hpdcp._base.errors import HpdcpError
from hpdcp._base.threads import Threads
from hpdcp._base.timing import log_message
from hpdcp._manage._run_folder import Opening, RunFolder
from hpdcp._manage.prune import prune_steps
from hpdcp._manage.retention import Keep


class BackgroundPruning:
    """Of one run, on rank 0.

    Args:
        open_folder: called once, on the thread.
        run: the job, as for `reasons_to_keep`.
        in_flight: the step that is being saved when it is called.
    """

    def __init__(
        self,
        open_folder: Callable[[], RunFolder],
        keep: Keep,
        opening: Opening,
        *,
        run: str,
        in_flight: Callable[[], int | None],
    ) -> None:
        self._open_folder = open_folder
        self._keep = keep
        self._opening = opening
        self._run = run
        self._in_flight = in_flight
        self._folder: RunFolder | None = None
        self._threads: Threads | None = None

    def begin(self, step: int, within: contextvars.Context) -> None:
        """Remove what step `step`, which is whole now, makes superfluous, under the configuration of `within`."""
        if self._threads is None:
            self._threads = Threads(1, "hpdcp-retention")
        self._threads.submit(within.run, self._prune, step)

    def wait(self) -> None:
        """Return when nothing is left to do."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def close(self) -> None:
        """Let go of the storage, once nothing is left to do."""
        self.wait()
        if self._folder is not None:
            self._folder.backend.close()
            self._folder = None

    def _prune(self, step: int) -> None:
        try:
            if self._folder is None:
                self._folder = self._open_folder()
            done = prune_steps(
                self._folder,
                self._keep,
                self._opening,
                run=self._run,
                just_saved=step,
                in_flight=self._in_flight(),
            )
        except HpdcpError as error:
            log_message(logging.WARNING, f"steps that step {step} makes superfluous were not removed: {error}")
            return
        for left, why in done.left.items():
            log_message(logging.WARNING, f"step {left} of {done.url} is superfluous and stays: {why}")
