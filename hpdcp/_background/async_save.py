"""Saves that go on while training does: what happens in the call of `async_save`.

    stage     plan what this rank holds, and copy what is needed of it into shared memory
    submit    send the worker a job: what was decided in the call, and where the copies lie
    return    a thread waits for the worker's answer, sets the future and runs the callback

Neither the worker nor that thread is a daemon: a script that ends waits for its checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpdcp._background._background_saves import SAVES
from hpdcp._background._environment import CallEnvironment
from hpdcp._background._hearing import Hearing
from hpdcp._background._joint_call import JointCall, joint_call
from hpdcp._background._save_in_flight import SaveInFlight
from hpdcp._background._save_job import Coordination, SaveJob
from hpdcp._background._specs import PlannerSpec, WriterSpec, sendable
from hpdcp._background._what_to_stage import Staging, stage
from hpdcp._background.response import AsyncSaveResponse
from hpdcp._base import arguments, config
from hpdcp._base.arguments import require_flags, require_instance
from hpdcp._base.errors import InvalidArgumentError, NotSupportedError
from hpdcp._base.timing import timed
from hpdcp._comm.exchange import Failed
from hpdcp._comm.identity import rank_and_world_size, run_id
from hpdcp._files.save_identity import SaveIdentity, agreed_identity
from hpdcp._files.writer import open_writer
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.standard_save_planner import StandardSavePlanner
from hpdcp._plan.storage import StorageWriter


def start_async_worker() -> None:
    """Start the background worker now and wait until it is ready, so that the first `async_save` need not."""
    with SAVES.lock:
        SAVES.worker().is_ready(None)


def wait_for_saves(timeout: float | None = None) -> bool:
    """Wait until no save is in flight; False when that takes longer than `timeout` seconds. For SIGTERM handlers."""
    return SAVES.wait(timeout)


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
    earlier save to complete first; then the call takes as long as one copy in memory. A state larger than the
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
        InvalidArgumentError: no location to save to, or not the same on all ranks; or a writer or planner that cannot
            be sent to the worker.
        NotSupportedError: a location that only this process sees, such as `memory://`.
        StateDictError: something cannot be stored so that it comes back exactly; names the key.
        HpdcpError: an earlier save failed and nobody asked about it.
    """
    call = joint_call(no_dist=no_dist, use_collectives=use_collectives)
    try:
        return _called(
            state_dict,
            checkpoint_id,
            storage_writer,
            planner,
            no_dist=no_dist,
            use_collectives=use_collectives,
            use_gloo=use_gloo,
            callback=callback,
            call=call,
        )
    except BaseException as error:
        if call is not None:
            # Whatever it was: the other ranks' workers wait for this rank's.
            call.fail(error)
        raise


def _called(
    state_dict: Mapping[Any, Any],
    checkpoint_id: str | Path | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    *,
    no_dist: bool,
    use_collectives: bool,
    use_gloo: bool,
    callback: Callable[[], object] | None,
    call: JointCall | None,
) -> AsyncSaveResponse:
    require_flags(no_dist=no_dist, use_collectives=use_collectives, use_gloo=use_gloo)
    require_instance("planner", planner, SavePlanner, instead=arguments.SAVE_PLANNER)
    if callback is not None and not callable(callback):
        raise InvalidArgumentError(f"callback is a {type(callback).__qualname__}; expected something to call.")
    if use_gloo and use_collectives and not no_dist:
        assert os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"), (
            "async_save(use_gloo=True) needs MASTER_ADDR and MASTER_PORT in the environment, as torchrun sets them: "
            "the background workers meet there. Set them, or leave use_gloo out."
        )
    with SAVES.lock:
        SAVES.wait_for_turn()
        SAVES.raise_unseen()
        return _save(
            state_dict,
            open_writer(checkpoint_id, storage_writer),
            planner or StandardSavePlanner(),
            rank_and_world_size(no_dist=no_dist),
            use_collectives=use_collectives and not no_dist,
            use_gloo=use_gloo,
            callback=callback,
            call=call,
        )


def _save(
    state_dict: Mapping[Any, Any],
    writer: StorageWriter,
    planner: SavePlanner,
    ranks: tuple[int, int],
    *,
    use_collectives: bool,
    use_gloo: bool,
    callback: Callable[[], object] | None,
    call: JointCall | None,
) -> AsyncSaveResponse:
    rank, world_size = ranks
    location = _location_of(writer)
    if use_collectives and not use_gloo and writer.location is None:
        raise InvalidArgumentError(
            "async_save exchanges plans through the storage, which needs a checkpoint_id or a writer that has a "
            f"location; {type(writer).__qualname__} has none. Pass checkpoint_id=, or use_gloo=True."
        )
    settings = config.current()
    coordination = Coordination.from_flags(use_collectives=use_collectives, use_gloo=use_gloo, world_size=world_size)
    if call is None:
        identity = agreed_identity(location, world_size)
    else:
        identity = SaveIdentity(call.settle(location, use_gloo), run_id(), call.number)
    specs = WriterSpec.of(writer), PlannerSpec.of(planner)
    pickled_settings = sendable(settings, "the configuration")
    context = PlannerContext(rank, world_size, rank == 0 or not use_collectives, use_collectives)
    worker = SAVES.worker()
    staging = Staging()
    failure: Exception | None = None
    try:
        staging = stage(state_dict, planner, writer, context, worker.arena, settings)
    except Exception as error:  # noqa: BLE001  # raised below
        # The other ranks' workers wait for this rank's part: its own is told why there is none, and tells them.
        failure = error
    job = SaveJob(
        identity=identity,
        rank=rank,
        world_size=world_size,
        coordination=coordination,
        master=(os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)),
        writer=specs[0],
        planner=specs[1],
        plan=staging.plan,
        staged=staging.staged,
        wave_bytes=staging.wave_bytes,
        key="" if staging.key is None else hashlib.blake2b(repr(staging.key).encode(), digest_size=16).hexdigest(),
        cached=[plan for plan in staging.cached if plan.plan_id not in worker.plans],
        known=[plan.plan_id for plan in staging.cached],
        rest=staging.rest,
        sampled=staging.sampled,
        failure=None if failure is None else Failed.of(rank, failure),
        environment=CallEnvironment.current(pickled_settings),
    )
    worker.plans |= {plan.plan_id for plan in staging.cached}
    response = AsyncSaveResponse(location)
    hearing = Hearing(call, worker, identity.attempt)
    save = SaveInFlight(worker, job, settings.exit_timeout, response, callback, staging.key, hearing)
    if staging.wave_bytes:
        failure = save.stage_waves(planner)
    SAVES.note_in_flight(response, save.start())
    if failure is not None:
        response.asked = True
        raise failure
    return response


def _location_of(writer: StorageWriter) -> str:
    """How the worker and the saves of this process name the writer's location, so that both count it under one name.

    Raises:
        NotSupportedError: the worker would save to storage that only its own process sees.
    """
    if writer.location is None:
        return type(writer).__qualname__
    with writer.open_location() as backend:
        if backend.process_local:
            raise NotSupportedError(
                f"async_save to {backend.url}: its background worker is another process, and what it stores there only "
                "it would see. Use save(), or another location."
            )
        return backend.url
