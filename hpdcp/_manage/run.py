"""The checkpoints of a run: `Checkpoints` saves, keeps and finds them."""

from __future__ import annotations

import contextvars
import json
import operator
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex

from hpdcp._background.async_save import async_save
from hpdcp._background.response import AsyncSaveResponse
from hpdcp._base.arguments import require_flags, require_instance
from hpdcp._base.errors import CheckpointNotFoundError, InvalidArgumentError
from hpdcp._comm.exchange import Exchange
from hpdcp._comm.identity import run_id
from hpdcp._comm.process_group import open_exchange
from hpdcp._engine.verbs import save
from hpdcp._files import registry
from hpdcp._files.writer import FileSystemWriter
from hpdcp._manage._background_pruning import BackgroundPruning
from hpdcp._manage._holding import hold_step, release_step
from hpdcp._manage._preemption import SignalWatch
from hpdcp._manage._run_folder import Opening, RunFolder
from hpdcp._manage._run_loads import LoadOptions, load_newest, load_step
from hpdcp._manage._run_saves import RunSaves, finished
from hpdcp._manage._schedule import Schedule
from hpdcp._manage._step_facts import StepFacts, checked_metrics, checked_user
from hpdcp._manage._step_names import DEFAULT_NAME, StepNames
from hpdcp._manage.prune import Pruning, prune_steps, remove_step
from hpdcp._manage.retention import Keep, ranked
from hpdcp._manage.step_record import StepRecord
from hpdcp._plan.planner import LoadPlanner, SavePlanner

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of one training run, each in a folder of its own below `location`.

        run = hpdcp.Checkpoints("checkpoints/run", every=500, keep=hpdcp.keep.latest(3))
        step = run.load_latest(state) or 0
        while step < total and not run.stopping:
            step += 1
            ...
            if run.due(step):
                run.save(step, state, metrics={"loss": loss})
        run.close()

    Every rank makes it alike and calls the same methods, as it does with `hpdcp.save`. Which checkpoints there are is
    asked of the storage each time; rank 0 looks and tells the others. It is also a context manager, which closes it.

    Args:
        location: the run's folder or URL.
        every: save every so many steps, or after so much time (a `timedelta`), which is measured by rank 0.
        when: a function of (step, seconds since the last save) that says whether to save; rank 0's answer counts.
        keep: which steps stay, such as `hpdcp.keep.latest(3) | hpdcp.keep.best("loss", 2, lowest=True)`; None: all of
            them. The others are removed in the background, behind the save that makes them superfluous.
        name: how the steps' folders are called.
        asynchronous: whether `save` returns once the state is copied, as `hpdcp.async_save` does.
        on_failure: "raise": a save that failed is raised by the next `save`, or by `close`. "warn": it is logged, and
            training goes on until more than `max_failures` in a row have failed.
        signals: after one of them, on whichever rank, `due` is true once on all ranks and `stopping` from then on.
            Handlers that were there are called as well.
        signal_interval: how many calls of `due` pass from one small all-reduce to the next, by which ranks tell each
            other of signals and times.
        backend, layout, storage_options: as `FileSystemWriter` takes them.
        use_gloo: as `hpdcp.async_save` takes it.

    Raises:
        InvalidArgumentError: an argument of another kind; signals, and this is not the main thread.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        every: int | timedelta | None = None,
        when: Callable[[int, float], bool] | None = None,
        keep: Keep | None = None,
        name: str = DEFAULT_NAME,
        asynchronous: bool = True,
        on_failure: str = "raise",
        max_failures: int = 3,
        signals: Iterable[int] = (signal.SIGTERM,),
        signal_interval: int = 10,
        backend: str | None = None,
        layout: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        use_gloo: bool = False,
    ) -> None:
        require_flags(asynchronous=asynchronous, use_gloo=use_gloo)
        require_instance("keep", keep, Keep, instead="hpdcp.keep.latest(3), and others joined to it by |")
        self._url = registry.resolve_checkpoint_id(location)
        self._names = StepNames(name)
        self._opening = Opening(backend, storage_options)
        self._layout = layout
        self._keep = keep
        self._asynchronous = asynchronous
        self._use_gloo = use_gloo
        self._saves = RunSaves(on_failure, max_failures)
        self._watch = SignalWatch(signals)
        self._schedule = Schedule(every, when, self._watch, signal_interval)
        self._run = run_id()
        self._folder: RunFolder | None = None
        """On rank 0, once it was asked to look."""
        self._pruning = (
            None
            if keep is None
            else BackgroundPruning(
                self._open, keep, self._opening, run=self._run, in_flight=lambda: self._saves.in_flight
            )
        )
        self._watch.start()

    @property
    def location(self) -> str:
        """The run's folder or URL."""
        return self._url

    @property
    def stopping(self) -> bool:
        """Whether one of `signals` has come to some rank and all have agreed on it, in `due`."""
        return self._schedule.stopping

    def due(self, step: int) -> bool:
        """Whether to save at this step; the same answer on every rank. Step 0 is due by a signal or `when` only.

        Raises:
            InvalidArgumentError: ranks ask for different steps.
        """
        return self._schedule.due(_checked_step(step), self._exchange())

    def save(
        self,
        step: int,
        state: Mapping[Any, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        user: Any = None,
        planner: SavePlanner | None = None,
    ) -> AsyncSaveResponse:
        """Save `state` as this step's checkpoint. Where one is there already, it is replaced in one step.

        It waits for the save before it. `metrics`, the time and `user` are stored in the checkpoint's own metadata.

        Args:
            metrics: names and numbers, such as {"loss": 0.5}; rank 0's are stored.
            user: whatever JSON can say, 8 KiB of it with the metrics; rank 0's is stored.
            planner: as for `hpdcp.save`.

        Returns:
            How the save goes; done already unless `asynchronous`.

        Raises:
            HpdcpError: the save before it failed, and `on_failure` does not let that pass; or as `hpdcp.save`, or
                `hpdcp.async_save`, raises.
            InvalidArgumentError: ranks save different steps; metrics or user cannot be stored.
        """
        folder = self._names.folder(_checked_step(step))
        facts: dict[str, str] = {}

        def ready() -> None:
            of_step = StepFacts(step, time.time(), self._run, checked_metrics(metrics), checked_user(user))
            facts.update(of_step.to_settings())

        self._saves.settle(self._exchange(), step, ready)
        url = f"{self._url.rstrip('/')}/{folder}"
        writer = FileSystemWriter(
            url,
            backend=self._opening.backend,
            layout=self._layout,
            storage_options=self._opening.storage_options,
            facts=facts,
        )
        if self._asynchronous:
            response = async_save(state, storage_writer=writer, planner=planner, use_gloo=self._use_gloo)
        else:
            response = finished(
                url, lambda: save(state, storage_writer=writer, planner=planner), pass_over=self._saves.pass_over
            )
        self._schedule.note_save()
        pruning = self._pruning if self._exchange().is_coordinator else None
        within = contextvars.copy_context()  # the configuration that holds here
        self._saves.begin(step, response, lambda: pruning.begin(step, within) if pruning else None)
        return response

    def load_latest(
        self, state: Mapping[Any, Any], *, verify: bool = False, planner: LoadPlanner | None = None
    ) -> int | None:
        """Fill `state` from the newest step that is whole; which step that is, or None: none was ever saved.

        Steps that did not finish, are being saved, or lack a file are passed over with a warning that says why. So is
        one that turns out to be damaged while it is read: an older one then fills all of `state` again.

        Args:
            verify: read every byte first and compare its checksum, each rank a part of the files.

        Raises:
            CorruptCheckpointError: there are checkpoints, and not one is sound.
            UnsupportedFormatError: a newer version of hpdcp saved the newest one.
            LoadMismatchError, StorageError, RankFailedError: as `hpdcp.load` raises.
        """
        require_flags(verify=verify)
        self.wait()
        options = LoadOptions(self._opening, planner, verify)
        return load_newest(self._url, self._looking, state, options, self._exchange())

    def load(self, step: int, state: Mapping[Any, Any], *, planner: LoadPlanner | None = None) -> None:
        """Fill `state` from this step.

        Raises:
            CheckpointNotFoundError: there is no such step that is whole; says which are.
            HpdcpError: as `hpdcp.load` raises.
        """
        self.wait()
        options = LoadOptions(self._opening, planner)
        load_step(_checked_step(step), self._looking, state, options, self._exchange())

    def records(self) -> list[StepRecord]:
        """What there is of every step, whole or not, ascending: state, time, metrics, who holds it."""

        def look() -> bytes:
            return json.dumps([record.to_json() for record in self._looking().look()]).encode()

        answer = self._exchange().broadcast("looking for the checkpoints of the run", look)
        return [StepRecord.from_json(fields) for fields in json.loads(answer)]

    def steps(self) -> list[int]:
        """The steps that are whole, ascending."""
        return [record.step for record in self.records() if record.is_whole]

    def latest(self) -> int | None:
        """The newest step that is whole; None where there is none."""
        return max(self.steps(), default=None)

    def best(self, metric: str, *, lowest: bool | None = None) -> int | None:
        """The whole step with the best value of `metric`; None where none has it.

        Args:
            lowest: whether the lowest value is the best. None: as `keep` has it for this metric, else the highest.
        """
        if lowest is None:
            lowest = self._keep is not None and self._keep.lowest.get(metric, False)
        whole = [record for record in self.records() if record.is_whole]
        return next((record.step for record in ranked(whole, metric, lowest=lowest)), None)

    def hold(self, step: int) -> None:
        """Have no retention remove this step, of whatever job, until `release`.

        Raises:
            CheckpointNotFoundError: there is no such step, or it is being removed just now.
        """
        self._on_rank_0("holding a step", lambda: hold_step(self._looking(), _checked_step(step)))

    def release(self, step: int) -> None:
        """Leave this step to retention again; nothing happens where nobody holds it."""
        self._on_rank_0("releasing a step", lambda: release_step(self._looking(), _checked_step(step)))

    def remove(self, step: int) -> None:
        """Remove this step, whatever `keep` says.

        Raises:
            CheckpointNotFoundError: there is no such step.
            CheckpointError: it is held, being read or being saved; nothing was removed.
        """
        self.wait()

        def remove() -> None:
            folder = self._looking()
            found = next((record for record in folder.look() if record.step == _checked_step(step)), None)
            if found is None:
                raise CheckpointNotFoundError(f"{folder.url} has no step {step}.")
            remove_step(folder, found, self._opening)

        self._on_rank_0("removing a step", remove)

    def prune(self, *, dry_run: bool = False) -> Pruning:
        """Remove now what `keep` has no use for, as happens in the background behind each save.

        Raises:
            InvalidArgumentError: there is no `keep`.
        """
        require_flags(dry_run=dry_run)
        keep = self._keep
        if keep is None:
            raise InvalidArgumentError("this run keeps every step: pass keep= to hpdcp.Checkpoints.")

        def prune() -> bytes:
            done = prune_steps(
                self._looking(), keep, self._opening, run=self._run, in_flight=self._saves.in_flight, dry_run=dry_run
            )
            return json.dumps(
                [done.url, done.removed, [*done.kept.items()], [*done.left.items()], done.nbytes]
            ).encode()

        answer = self._exchange().broadcast("removing superfluous steps", prune)
        url, removed, kept, left, nbytes = json.loads(answer)
        return Pruning(url, tuple(removed), dict(kept), dict(left), nbytes, dry_run)

    def wait(self) -> None:
        """Return when this rank has nothing in flight, neither a save nor removals behind one, however they went."""
        self._saves.wait()
        if self._pruning is not None:
            self._pruning.wait()

    def close(self) -> None:
        """Wait for what is in flight, put signal handlers back, and let go of the storage. Idempotent.

        Raises:
            HpdcpError: the last save failed, and `on_failure` does not let that pass.
        """
        try:
            self.wait()
            self._saves.settle(self._exchange(), None)
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # Other ranks may be elsewhere: nothing is to be agreed upon, and how the last save went has been logged.
        try:
            self.wait()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._watch.stop()
        if self._pruning is not None:
            self._pruning.close()
        if self._folder is not None:
            self._folder.backend.close()
            self._folder = None

    def _exchange(self) -> Exchange:
        # Asked for each time: a process group may be made after this object, or made anew.
        return open_exchange(no_dist=False, use_collectives=True)

    def _looking(self) -> RunFolder:
        """On rank 0."""
        if self._folder is None:
            self._folder = self._open()
        return self._folder

    def _open(self) -> RunFolder:
        return RunFolder(self._opening.open(self._url), self._names)

    def _on_rank_0(self, step: str, action: Callable[[], None]) -> None:
        def done() -> bytes:
            action()
            return b""

        self._exchange().broadcast(step, done)


def _checked_step(step: object) -> int:
    if isinstance(step, SupportsIndex) and not isinstance(step, bool) and (number := operator.index(step)) >= 0:
        return number
    raise InvalidArgumentError(f"step is {step!r}; expected a whole number from 0.")
