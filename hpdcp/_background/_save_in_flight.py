"""One save in flight: it is submitted to the worker, which is answered while it asks for waves, and waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

from hpdcp._background._background_saves import SAVES
from hpdcp._background._messages import Message
from hpdcp._background._sampled import Sampled
from hpdcp._background._save_job import SaveAnswer, SaveJob
from hpdcp._background._staging import build_staged_state_dict
from hpdcp._background._worker_client import WorkerClient
from hpdcp._background._worker_exchange import report_dead_worker
from hpdcp._background.response import AsyncSaveResponse
from hpdcp._base.errors import HpdcpError, WorkerDiedError, rebuild
from hpdcp._base.saves_in_flight import SaveToLocation
from hpdcp._base.timing import log_message
from hpdcp._comm.exchange import Failed
from hpdcp._format.metadata import Metadata
from hpdcp._plan.plan_cache import PLANS, CachedPlan
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.save_plan import SavePlan

_LOOK_SECONDS: Final = 0.2
"""Between two looks whether the script has ended, or the save has."""


class SaveInFlight:
    """Submits one job to the worker, which may still be starting, and sets the response when its answer comes.

    Args:
        exit_timeout: seconds that a script that has ended waits for the save.
        key: under which the plan is cached; None where it is not.
    """

    def __init__(
        self,
        worker: WorkerClient,
        job: SaveJob,
        exit_timeout: float,
        response: AsyncSaveResponse,
        callback: Callable[[], object] | None,
        key: Hashable | None,
    ) -> None:
        self._worker = worker
        self._job = job
        self._response = response
        self._location: SaveToLocation | None = None
        self._callback = callback
        self._key = key
        self._exit_timeout = exit_timeout
        self._submitted = False
        self._early_answer: Message | None = None
        """The answer, where it came while waves were being staged."""

    def stage_waves(self, planner: SavePlanner) -> Exception | None:
        """Stage what the worker asks for, wave by wave, until it needs nothing more; an error for the caller, if any.

        Called before `start`, in the thread that called `async_save`: until it returns, the state is still needed.
        """
        failure: Exception | None = None
        try:
            self._submit()
            while (message := self._worker.receive()).kind in ("stage", "sample"):
                try:
                    plan = SavePlan.from_bytes(message.payload)
                    if message.kind == "sample":
                        self._worker.send_samples(Sampled.of(planner, plan))
                        continue
                    self._worker.send_wave(build_staged_state_dict(planner, plan, self._worker.arena))
                except Exception as error:  # noqa: BLE001  # the worker must hear of it, so that it does not wait
                    failure = error
                    self._worker.refuse_wave(f"{type(error).__name__}: {error}")
            if message.kind != "released":
                self._early_answer = message
        except EOFError:
            # `_run` meets the same end, and says so.
            pass
        except WorkerDiedError as error:
            failure = error
        return failure

    def start(self) -> threading.Thread:
        """Wait for the save on a thread, which is not a daemon; until it ends, the location is saved to."""
        self._location = SaveToLocation(self._response.checkpoint)
        thread = threading.Thread(target=self._run, name="hpdcp-async-save", daemon=False)
        try:
            thread.start()
        except BaseException:
            self._location.end()
            raise
        return thread

    def _run(self) -> None:
        """Wait for the worker's answer, set the future, run the callback."""
        assert self._location is not None
        guard = threading.Thread(target=self._bound_the_exit, name="hpdcp-exit", daemon=True)
        guard.start()
        try:
            metadata = self._await()
        except BaseException as error:  # noqa: BLE001  # for whoever asks
            self._location.end()
            SAVES.note_failure(self._response)
            self._response.future.set_exception(error)
            return
        # Before the callback, which may load what was saved.
        self._location.end()
        self._response.future.set_result(metadata)
        if self._callback is not None:
            try:
                self._callback()
            except Exception:  # the checkpoint is whole; what is wrong is the caller's
                logging.getLogger("hpdcp").exception("the callback of async_save failed; the checkpoint is published")

    def _submit(self) -> None:
        if not self._submitted:
            self._worker.wait_until_ready()
            self._worker.submit(self._job)
            self._submitted = True

    def _await(self) -> Metadata:
        try:
            self._submit()
            message = self._early_answer or self._worker.receive()
        except EOFError:
            self._tell_the_others()
            raise self._worker.death() from None
        except WorkerDiedError:
            self._tell_the_others()
            raise
        answer = SaveAnswer.from_message(message)
        if answer.replanned and self._key is not None:
            # Some rank lacks the plan. Staged in part once more, it could not be planned for good: make another.
            PLANS.retain(self._key, ())
        if answer.failed is not None:
            raise _error_of(answer.failed)
        if answer.plan and self._key is not None:
            plan = CachedPlan.from_bytes(answer.plan)
            PLANS.put(self._key, plan)
            self._worker.plans.add(plan.plan_id)
        return Metadata.from_bytes(answer.metadata, where="the metadata of this save")

    def _tell_the_others(self) -> None:
        try:
            report_dead_worker(self._job)
        except (HpdcpError, RuntimeError) as error:
            log_message(logging.WARNING, f"the other ranks could not be told that this rank's worker died: {error}")

    def _bound_the_exit(self) -> None:
        """A script that ends waits for its checkpoint, but not forever for peers that are gone."""
        main = threading.main_thread()
        while main.is_alive():
            main.join(_LOOK_SECONDS)
            if self._response.done():
                return
        last = time.monotonic() + self._exit_timeout
        while not self._response.done():
            if time.monotonic() > last:
                log_message(
                    logging.ERROR,
                    f"the save to {self._response.checkpoint} did not complete within {self._exit_timeout:.0f} s of "
                    "the script's end; it is given up",
                )
                self._worker.kill()
                return
            time.sleep(_LOOK_SECONDS)


def _error_of(failed: Failed) -> HpdcpError:
    """The error a worker reported, of the closest class hpdcp has, with the worker's traceback as a note."""
    error: HpdcpError = WorkerDiedError(failed.message)
    for kind in failed.lineage:
        found = rebuild(kind, failed.message)
        if type(found).__name__ == kind:
            error = found
            break
    error.add_note(f"Traceback of the background worker:\n{failed.trace}")
    return error
