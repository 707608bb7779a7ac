"""One save in flight: it is submitted to the worker, which is answered while it asks for waves, and waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

from hpdcp._background._background_saves import SAVES
from hpdcp._background._hearing import Hearing
from hpdcp._background._messages import Message
from hpdcp._background._sampled import Sampled
from hpdcp._background._save_job import SaveAnswer, SaveJob
from hpdcp._background._staging import build_staged_state_dict
from hpdcp._background._worker_client import WorkerClient
from hpdcp._background._worker_exchange import published_by, report_dead_worker
from hpdcp._background.response import AsyncSaveResponse
from hpdcp._base.errors import HpdcpError, PeerLostError, WorkerDiedError
from hpdcp._base.saves_in_flight import SaveToLocation
from hpdcp._base.timing import log_message
from hpdcp._comm.exchange import COORDINATOR, Failed
from hpdcp._format.metadata import Metadata
from hpdcp._plan.plan_cache import PLANS, CachedPlan
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.save_plan import SavePlan

_LOOK_SECONDS: Final = 0.2
"""Between two looks whether the script has ended, or the save has."""
_PUBLISHING_SECONDS: Final = 3.0
"""How long a rank whose worker died looks whether the coordinator, which may have all it needs, publishes."""


class SaveInFlight:
    """Submits one job to the worker, which may still be starting, and sets the response when its answer comes.

    Args:
        exit_timeout: seconds that a script that has ended waits for the save.
        key: under which the plan is cached; None where it is not.
        hearing: of the other ranks.
    """

    def __init__(
        self,
        worker: WorkerClient,
        job: SaveJob,
        exit_timeout: float,
        response: AsyncSaveResponse,
        callback: Callable[[], object] | None,
        key: Hashable | None,
        hearing: Hearing,
    ) -> None:
        self._worker = worker
        self._job = job
        self._response = response
        self._location: SaveToLocation | None = None
        self._callback = callback
        self._key = key
        self._exit_timeout = exit_timeout
        self._hearing = hearing
        self._submitted = False
        self._early_answer: Message | None = None
        """The answer, where it came while waves were being staged."""

    def stage_waves(self, planner: SavePlanner) -> Exception | None:
        """Stage what the worker asks for, wave by wave, until it needs nothing more; an error for the caller, if any.

        Called before `start`, in the thread that called `async_save`: until it returns, the state is still needed.
        """
        failure: Exception | None = None
        self._hearing.start()
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
        except HpdcpError as error:
            # `_run` meets it as well.
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
        try:
            self._conclude()
        finally:
            self._hearing.end()

    def _conclude(self) -> None:
        assert self._location is not None
        threading.Thread(target=self._bound_the_exit, name="hpdcp-exit", daemon=True).start()
        self._hearing.start()
        try:
            metadata = self._await()
        except BaseException as error:  # noqa: BLE001  # for whoever asks
            # To others a worker that died is a rank that is lost.
            self._hearing.tell(PeerLostError(str(error)) if isinstance(error, WorkerDiedError) else error)
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
        """Send the job once the worker is there; raises what another rank failed of, where that is known before."""
        if not self._submitted:
            while not self._worker.is_ready(_LOOK_SECONDS):
                if self._hearing.given_up:
                    raise self._hearing.error()
            self._worker.submit(self._job)
            self._submitted = True

    def _await(self) -> Metadata:
        try:
            self._submit()
            message = self._early_answer or self._worker.receive()
        except EOFError:
            return self._published_before(self._worker.death())
        except WorkerDiedError as death:
            return self._published_before(death)
        answer = SaveAnswer.from_message(message)
        if answer.replanned and self._key is not None:
            # Some rank lacks the plan. Staged in part once more, it could not be planned for good: make another.
            PLANS.retain(self._key, ())
        if answer.failed is not None:
            raise self._hearing.cause_of(_reported(answer.failed))
        if answer.plan and self._key is not None:
            plan = CachedPlan.from_bytes(answer.plan)
            PLANS.put(self._key, plan)
            self._worker.plans.add(plan.plan_id)
        return Metadata.from_bytes(answer.metadata, where="the metadata of this save")

    def _published_before(self, death: WorkerDiedError) -> Metadata:
        """What was published of this save although this rank's worker died; else raises `death`.

        The worker may have published it itself. The coordinator's may have all it needs, and is waited for a moment.
        """
        # Whether it was published or not: they may wait for this worker's last message.
        self._tell_the_others()
        last = time.monotonic() + (0 if self._job.rank == COORDINATOR else _PUBLISHING_SECONDS)
        while True:
            try:
                published = published_by(self._job, self._job.writer.open(self._job.identity))
            except Exception as error:  # noqa: BLE001  # whatever it is: `death` is what happened
                raise WorkerDiedError(
                    f"{death} Whether this save was published before could not be found out ({error}): load it, or "
                    "save again."
                ) from death
            if published is not None:
                log_message(logging.WARNING, f"{death} This save was published before that, and is whole.")
                return published
            if time.monotonic() >= last:
                break
            time.sleep(_LOOK_SECONDS)
        if self._hearing.given_up:
            raise self._hearing.error() from death
        raise WorkerDiedError(f"{death} Nothing of this save was published; an earlier checkpoint is untouched.")

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


def _reported(failed: Failed) -> HpdcpError:
    """The error a worker reported, with the worker's traceback as a note."""
    error = failed.rebuilt(WorkerDiedError)
    error.add_note(f"Traceback of the background worker:\n{failed.trace}")
    return error
