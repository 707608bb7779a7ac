"""Saves that go on while training does: stage in the caller, persist in a background worker.

    caller      plan what this rank holds → copy it into shared memory → hand over → return
    worker      exchange plans with the other ranks' workers → write → commit → answer
    join thread waits for the answer, sets the future, runs the callback

Neither the worker nor the join thread is a daemon: a script that ends waits for its checkpoint.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpdcp._background._arena import Arena
from hpdcp._background._jobs import Coordination, Job, PlannerSpec, WriterSpec, sendable, tell_of_death
from hpdcp._background._link import Message
from hpdcp._background._staging import StagedState, build_staged_state_dict, with_copied_values
from hpdcp._background._worker_process import WorkerProcess, search_path
from hpdcp._background.response import AsyncSaveResponse
from hpdcp._base import config
from hpdcp._base.config import Config
from hpdcp._base.errors import HpdcpError, InvalidArgumentError, NotSupportedError, WorkerDiedError, rebuild
from hpdcp._base.timing import log_message, timed
from hpdcp._comm.identity import attempt_id, rank_and_world_size, run_id
from hpdcp._engine.save import plan_key
from hpdcp._files.folder_save import SaveIdentity, next_ordinal
from hpdcp._files.writer import open_writer
from hpdcp._format.metadata import Metadata
from hpdcp._plan.plan_cache import PLANS, CachedPlan
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.replicas import SMALL_REPLICA_BYTES
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.standard_planner import StandardSavePlanner
from hpdcp._plan.storage import StorageWriter

_LOOK_SECONDS: Final = 0.2


class _Trainer:
    """The one worker of this process, the save it is busy with, and failures that nobody has seen."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._worker: WorkerProcess | None = None
        self._flying: tuple[AsyncSaveResponse, threading.Thread] | None = None
        self._failed: list[AsyncSaveResponse] = []

    def worker(self) -> WorkerProcess:
        """A live worker, started where there is none."""
        with self.lock:
            if self._worker is not None and not self._worker.alive:
                self._worker.stop(0)
                self._worker = None
            if self._worker is None:
                self._worker = WorkerProcess()
            return self._worker

    def wait_for_turn(self) -> None:
        """Return when no save is in flight."""
        if self._flying is None:
            return
        response, thread = self._flying
        began = time.monotonic()
        busy = not response.done()
        thread.join()
        self._flying = None
        if busy:
            waited = time.monotonic() - began
            log_message(logging.INFO, f"async_save waited {waited:.4f} seconds for the save before it to land")

    def take_off(self, response: AsyncSaveResponse, thread: threading.Thread) -> None:
        """Note the save that is in flight now."""
        self._flying = (response, thread)

    def landed_badly(self, response: AsyncSaveResponse) -> None:
        """Note a failure, until somebody has seen it."""
        self._failed.append(response)

    def raise_unseen(self) -> None:
        """Raise the failure of an earlier save that nobody asked about."""
        unseen = [response for response in self._failed if not response.asked]
        self._failed = []
        for response in unseen:
            error = response.future.exception()
            assert error is not None
            raise error

    def wait(self, timeout: float | None) -> bool:
        """Whether nothing is in flight any more, after at most `timeout` seconds."""
        flying = self._flying
        if flying is not None:
            flying[1].join(timeout)
            return not flying[1].is_alive()
        return True

    def finish(self) -> None:
        """At exit, when no join thread is left: tell what nobody has seen, and let the worker end."""
        for response in self._failed:
            if not response.asked:
                error = response.future.exception()
                log_message(logging.ERROR, f"the save to {response.checkpoint} failed and nobody asked: {error}")
        if self._worker is not None:
            self._worker.stop(10.0)
            self._worker = None

    def forget(self) -> None:
        """In a forked child, which has neither the worker nor its saves."""
        if self._worker is not None:
            self._worker.forget()
        self.__init__()  # type: ignore[misc]


_trainer: Final = _Trainer()
os.register_at_fork(after_in_child=_trainer.forget)
atexit.register(_trainer.finish)


def start_async_worker() -> None:
    """Start the background worker now and wait until it is ready, so that the first `async_save` need not."""
    with _trainer.lock:
        _trainer.worker().wait_until_ready()


def wait_for_saves(timeout: float | None = None) -> bool:
    """Wait until no save is in flight; False when that takes longer than `timeout` seconds. For SIGTERM handlers."""
    return _trainer.wait(timeout)


@timed("async_save")
def async_save(
    state_dict: Mapping[Any, Any],
    *,
    checkpoint_id: str | Path | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    use_gloo: bool = False,
    callback: Callable[[], object] | None = None,
) -> AsyncSaveResponse:
    """Copy what this rank holds and return; a background worker saves it while training goes on.

    Every rank of the default process group calls it. The state may be changed the moment it returns. It waits for an
    earlier save to land first; then the call takes as long as one copy in memory. A state larger than the
    configuration's `async_staging_budget` (by default half of what memory the host has to spare, divided by its ranks)
    is copied and written in waves, and the call returns after the last copy.

    Args:
        state_dict, checkpoint_id, storage_writer, planner, no_dist: as for `save`. A writer or planner of a class of
            one's own must be one that another process can import.
        use_collectives: False: each rank's worker publishes `{rank}.metadata` and waits for nobody.
        use_gloo: whether workers plan and commit over a gloo group of their own, which they build through
            MASTER_ADDR and MASTER_PORT; else through messages on the storage itself, without any process group.
        callback: called once, without arguments, from another thread, after the checkpoint is published.

    Raises:
        AssertionError: `use_gloo`, and MASTER_ADDR or MASTER_PORT is not set.
        InvalidArgumentError: no place to save to, or a writer or planner that cannot be sent to the worker.
        NotSupportedError: a place that only this process sees, such as `memory://`.
        StateDictError: something cannot be stored so that it comes back exactly; names the key.
        HpdcpError: an earlier save failed and nobody asked about it.
    """
    if use_gloo and use_collectives and not no_dist:
        assert os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"), (
            "async_save(use_gloo=True) needs MASTER_ADDR and MASTER_PORT in the environment, as torchrun sets them: "
            "the background workers meet there. Set them, or leave use_gloo out."
        )
    with _trainer.lock:
        _trainer.wait_for_turn()
        _trainer.raise_unseen()
        call = _Call(
            state_dict,
            open_writer(checkpoint_id, storage_writer),
            planner or StandardSavePlanner(),
            rank_and_world_size(no_dist=no_dist),
            use_collectives=use_collectives and not no_dist,
            use_gloo=use_gloo,
        )
        return call.run(callback)


class _Call:
    """One call of `async_save`."""

    def __init__(
        self,
        state_dict: Mapping[Any, Any],
        writer: StorageWriter,
        planner: SavePlanner,
        ranks: tuple[int, int],
        *,
        use_collectives: bool,
        use_gloo: bool,
    ) -> None:
        self._rank, self._world_size = ranks
        self._coordination = Coordination.from_flags(
            use_collectives=use_collectives, use_gloo=use_gloo, world_size=self._world_size
        )
        self._state_dict = state_dict
        self._writer = writer
        self._planner = planner
        self._place = _place_of(writer)
        if use_collectives and not use_gloo and writer.place is None:
            raise InvalidArgumentError(
                "async_save exchanges plans through the storage, which needs a checkpoint_id or a writer that has a "
                f"place; {type(writer).__qualname__} has none. Pass checkpoint_id=, or use_gloo=True."
            )
        self._settings = config.current()
        self._context = PlannerContext(
            self._rank, self._world_size, self._rank == 0 or not use_collectives, use_collectives
        )

    def run(self, callback: Callable[[], object] | None) -> AsyncSaveResponse:
        run = run_id()
        ordinal = next_ordinal(run, self._place, self._world_size)
        attempt = attempt_id(self._place, ordinal, alone=self._world_size == 1)
        identity = SaveIdentity(attempt, run, ordinal)
        writer, planner = WriterSpec.of(self._writer), PlannerSpec.of(self._planner)
        settings = sendable(self._settings, "the configuration")
        worker = _trainer.worker()
        stage = _Stage()
        failure: Exception | None = None
        try:
            stage = self._stage(worker)
        except Exception as error:  # noqa: BLE001  # raised below
            # The other ranks' workers wait for this rank's part: theirs is told why there is none, and tells them.
            failure = error
        job = Job(
            identity=identity,
            rank=self._rank,
            world_size=self._world_size,
            coordination=self._coordination,
            master=(os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)),
            writer=writer,
            planner=planner,
            plan=stage.plan,
            staged=stage.staged,
            wave_bytes=stage.wave_bytes,
            key="" if stage.key is None else hashlib.blake2b(repr(stage.key).encode(), digest_size=16).hexdigest(),
            cached=[plan for plan in stage.plans if plan.plan_id not in worker.plans],
            known=[plan.plan_id for plan in stage.plans],
            rest=stage.rest,
            failure="" if failure is None else f"{type(failure).__name__}: {failure}",
            config=settings,
            environment=dict(os.environ),
            search_path=search_path(),
        )
        worker.plans |= {plan.plan_id for plan in stage.plans}
        response = AsyncSaveResponse(self._place)
        flight = _Flight(worker, job, self._settings.exit_deadline, response, callback, stage.key)
        if stage.wave_bytes:
            failure = flight.serve_waves(self._planner)
        thread = threading.Thread(target=flight.run, name="hpdcp-async-save", daemon=False)
        thread.start()
        _trainer.take_off(response, thread)
        if failure is not None:
            response.asked = True
            raise failure
        return response

    def _stage(self, worker: WorkerProcess) -> _Stage:
        self._planner.configure_planner(with_copied_values(self._state_dict), self._context)
        planner_key = self._planner.cache_key() if self._context.collective else None
        key = None if planner_key is None else plan_key(self._writer, self._planner, planner_key)
        plans = [] if key is None else PLANS.find(key)
        plan, rest = self._needed(plans) if plans else (self._planner.build_local_plan(), None)
        budget = _staging_budget(self._settings, worker.arena)
        if int(np.maximum(plan.nbytes, 0).sum()) <= budget:
            staged = build_staged_state_dict(self._planner, plan, worker.arena)
            return _Stage(key, plans, plan, staged, rest)
        # The worker asks for what it needs, so it must know of all there is, and how long each of it is.
        return _Stage(key, plans, self._planner.build_local_plan() if plans else plan, wave_bytes=budget)

    def _needed(self, plans: Sequence[CachedPlan]) -> tuple[SavePlan, SavePlan]:
        """Of what this rank holds, what it writes by these plans or is asked to compare with others', and the rest."""
        local = SavePlan.from_bytes(plans[0].local)
        parts = [SavePlan.from_part(plan.part, SavePlan.from_bytes(plan.local)) for plan in plans]
        most = {"off": -1, "small": SMALL_REPLICA_BYTES, "all": None}[self._settings.check_replicas]
        needed = rows_needed(local, parts, most)
        return local.select(needed), local.select(np.setdiff1d(np.arange(len(local)), needed))


@dataclass(frozen=True, slots=True)
class _Stage:
    """What came of staging."""

    key: Hashable | None = None
    """Under which the plan is cached."""
    plans: Sequence[CachedPlan] = ()
    """What is cached there."""
    plan: SavePlan | None = None
    staged: StagedState | None = None
    """None where the state goes in waves."""
    rest: SavePlan | None = None
    """What this rank holds beside `plan`, where earlier plans have others write it."""
    wave_bytes: int = 0


def _place_of(writer: StorageWriter) -> str:
    """What the writer's place is called by the worker and by saves in this process, which count it under one name.

    Raises:
        NotSupportedError: the worker would save to a place that dies with it.
    """
    if writer.place is None:
        return type(writer).__qualname__
    with writer.open_place() as backend:
        if backend.process_local:
            raise NotSupportedError(
                f"async_save to {backend.url}: its background worker is another process, and what it stores there only "
                "it would see. Use save(), or another place."
            )
        return backend.url


def _staging_budget(settings: Config, arena: Arena) -> int:
    """Bytes that one rank may stage at a time: as configured, else its share of half the host's memory.

    What staging holds already counts as available. The largest single item fits whatever the budget is.
    """
    if settings.async_staging_budget is not None:
        return max(1, settings.async_staging_budget)
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, (available // ranks + arena.capacity) // 2)


def rows_needed(local: SavePlan, parts: Sequence[SavePlan], most: int | None) -> npt.NDArray[np.int64]:
    """Items of `local` of which `parts` write something, or which are compared since they take at most `most` bytes."""
    if most is None:
        return np.arange(len(local), dtype=np.int64)
    wanted = local.nbytes <= most
    asked = [*parts, *(part.handed() for part in parts if part.hand_over is not None)]
    names = {(index.fqn, index.owner) for part in asked for index in (item.index for item in part.items)}
    written = [(index.fqn, index.owner) in names for index in (item.index for item in local.items)]
    return np.flatnonzero(wanted | np.array(written, dtype=np.bool_))


class _Flight:
    """What the join thread does: hand one job to the worker, which may still be starting, and wait for its answer."""

    def __init__(
        self,
        worker: WorkerProcess,
        job: Job,
        exit_deadline: float,
        response: AsyncSaveResponse,
        callback: Callable[[], object] | None,
        key: Hashable | None,
    ) -> None:
        self._worker = worker
        self._job = job
        self._response = response
        self._callback = callback
        self._key = key
        self._exit_deadline = exit_deadline
        self._submitted = False
        self._final: Message | None = None

    def serve_waves(self, planner: SavePlanner) -> Exception | None:
        """Stage what the worker asks for, piece by piece, until it needs nothing more; an error for the caller, if any.

        Called before `run`, in the thread that called `async_save`: until it returns, the state is still needed.
        """
        failure: Exception | None = None
        try:
            self._submit()
            while (message := self._worker.answer()).kind == "fetch":
                try:
                    plan = SavePlan.from_bytes(message.payload)
                    self._worker.supply(build_staged_state_dict(planner, plan, self._worker.arena))
                except Exception as error:  # noqa: BLE001  # the worker must hear of it, so that it does not wait
                    failure = error
                    self._worker.refuse(f"{type(error).__name__}: {error}")
            if message.kind != "released":
                self._final = message
        except EOFError:
            # `run` meets the same end, and says so.
            pass
        except WorkerDiedError as error:
            failure = error
        return failure

    def run(self) -> None:
        guard = threading.Thread(target=self._bound_the_exit, name="hpdcp-exit", daemon=True)
        guard.start()
        try:
            metadata = self._await()
        except BaseException as error:  # noqa: BLE001  # for whoever asks
            _trainer.landed_badly(self._response)
            self._response.future.set_exception(error)
            return
        self._response.future.set_result(metadata)
        if self._callback is not None:
            try:
                self._callback()
            except Exception:  # the checkpoint is whole; what is wrong is the caller's
                logging.getLogger("hpdcp").exception("the callback of async_save failed; the checkpoint is published")

    def _await(self) -> Metadata:
        try:
            self._submit()
            message = self._final or self._worker.answer()
        except EOFError:
            self._tell_the_others()
            raise self._worker.obituary() from None
        except WorkerDiedError:
            self._tell_the_others()
            raise
        if message.facts["replanned"] and self._key is not None:
            # Some rank lacks the plan. Staged in part once more, it could not be planned for good: make another.
            PLANS.retain(self._key, ())
        if message.kind == "failed":
            raise _error_of(message)
        length = message.facts["metadata"]
        if message.payload[length:] and self._key is not None:
            plan = CachedPlan.from_bytes(message.payload[length:])
            PLANS.put(self._key, plan)
            self._worker.plans.add(plan.plan_id)
        return Metadata.from_bytes(message.payload[:length], where="the metadata of this save")

    def _submit(self) -> None:
        if not self._submitted:
            self._worker.wait_until_ready()
            self._worker.submit(self._job)
            self._submitted = True

    def _tell_the_others(self) -> None:
        try:
            tell_of_death(self._job)
        except (HpdcpError, RuntimeError) as error:
            log_message(logging.WARNING, f"the other ranks could not be told that this rank's worker died: {error}")

    def _bound_the_exit(self) -> None:
        """A script that ends waits for its checkpoint, but not forever for peers that are gone."""
        main = threading.main_thread()
        while main.is_alive():
            main.join(_LOOK_SECONDS)
            if self._response.done():
                return
        deadline = time.monotonic() + self._exit_deadline
        while not self._response.done():
            if time.monotonic() > deadline:
                log_message(
                    logging.ERROR,
                    f"the save to {self._response.checkpoint} did not land within {self._exit_deadline:.0f} s of the "
                    "script's end; it is given up",
                )
                self._worker.kill()
                return
            time.sleep(_LOOK_SECONDS)


def _error_of(message: Message) -> HpdcpError:
    """The error a worker reported, of the closest class hpdcp has, with the worker's traceback as a note."""
    error: HpdcpError = WorkerDiedError(message.facts["message"])
    for kind in message.facts["kinds"]:
        found = rebuild(kind, message.facts["message"])
        if type(found).__name__ == kind:
            error = found
            break
    error.add_note(f"Traceback of the background worker:\n{message.facts['trace']}")
    return error
