"""A run under everything that befalls one, against a plain model of what has to be there.

Two jobs save, hold, load and prune in one folder; saves and removals are cut off at any request to the store, as by
`kill -9`; clocks go on and jump. At any moment, on every store: if ever a step was whole, one is; what is held, read or
being saved stays; what nobody prunes stays; nothing foreign is touched; a resume finds the newest whole one.

`HPDCP_TEST_EXAMPLES=10000` looks longer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpdcp import keep
from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointNotFoundError
from hpdcp._files import registry
from hpdcp._files.registry import open_backend
from hpdcp._format.file_names import METADATA
from hpdcp._manage._marks import READING, marked
from hpdcp._manage.retention import JUST_SAVED_SECONDS, Keep
from hpdcp._manage.run import Checkpoints
from hpdcp._manage.step_record import StepRecord
from hpdcp_backends.generic import GenericBackend
from hpdcp_backends.local import LocalBackend

EXAMPLES = int(os.environ.get("HPDCP_TEST_EXAMPLES", "25"))
MEMORY = "/dev/shm"
"""A file system where making durable costs nothing."""
FOREIGN = ("notes.txt", "step_final/mine.bin", "step_00000002/notes.txt", "logs/step_00000001/.metadata")
POLICIES: tuple[Keep, ...] = (
    keep.latest(1),
    keep.latest(2) | keep.every(4),
    keep.best("loss", 1, lowest=True),
    keep.hours(1) | keep.best("loss", 2),
    keep.where(lambda record: record.user == "milestone"),
)


class Killed(BaseException):
    """The process ends here, as if by kill -9: nothing of hpdcp cleans up after it."""


@dataclass
class Power:
    """How many more changes to the store this process makes before it is killed; None: it is not."""

    left: int | None = None
    off: bool = False

    def change(self) -> None:
        if self.off:
            raise Killed
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.off = True
                raise Killed


def mortal(kind: type[Backend], power: Power) -> type[Backend]:
    """The store, as seen by a process that may be killed before any change that it makes."""

    class Mortal(kind):  # type: ignore[misc, valid-type]
        def publish(self, key: str, data: bytes) -> None:
            power.change()
            super().publish(key, data)

        def write(self, *arguments: Any, **options: Any) -> None:
            power.change()
            super().write(*arguments, **options)

        def delete(self, keys: Any) -> None:
            for key in list(keys):
                power.change()
                super().delete([key])

    Mortal.__qualname__ = kind.__qualname__
    return Mortal


class Clock:
    """Stands for the system's, not for that of the store, which tells when a mark was made."""

    def __init__(self) -> None:
        self.offset = 0.0

    def time(self) -> float:
        return REAL_TIME() + self.offset


REAL_TIME = time.time


class RunMachine(RuleBasedStateMachine):
    """On the local file system; `MemoryMachine` on memory."""

    kind: type[Backend] = LocalBackend

    @initialize(policies=st.tuples(st.sampled_from(POLICIES), st.sampled_from(POLICIES)))
    def begin(self, policies: tuple[Keep, Keep]) -> None:
        self.policies = policies
        self.power = Power()
        self.clock = Clock()
        self.stack = contextlib.ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.place = self.new_place()
        opened = mortal(self.kind, self.power)
        find = registry._find
        patch.setattr(
            registry, "_find", lambda name, what, *rest: opened if what == "backend" else find(name, what, *rest)
        )
        patch.setattr("time.time", self.clock.time)
        self.patch = patch
        self.jobs = [self.job(0), self.job(1)]
        self.whole: dict[int, dict[str, Any]] = {}
        """Steps that were committed and that nobody said he removed."""
        self.held: set[int] = set()
        self.reading: dict[int, contextlib.ExitStack] = {}
        self.ever = False
        with open_backend(self.place) as backend:
            backend.prepare()
            for name in FOREIGN:
                backend.publish(name, b"mine")

    def new_place(self) -> str:
        folder = tempfile.mkdtemp(prefix="hpdcp-machine-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def job(self, number: int) -> Checkpoints:
        """A job that is started again is another one."""
        self.patch.setenv("HPDCP_RUN_ID", uuid.uuid4().hex)
        return Checkpoints(self.place, keep=self.policies[number], asynchronous=False, signals=())

    def restart(self, number: int) -> None:
        self.power.left, self.power.off = None, False
        self.jobs[number] = self.job(number)

    def steps_there(self) -> set[int]:
        with open_backend(self.place) as backend:
            keys = {info.key for info in backend.list_keys(recursive=True)}
        return {step for step in range(1, 13) if f"step_{step:08d}/{METADATA}" in keys}

    def pruned_by(self, number: int, before: dict[int, dict[str, Any]], newest: int, now: float) -> None:
        """What is gone since `before` is gone for a reason; forget it."""
        gone = before.keys() - self.steps_there()
        assert newest not in gone, "the newest whole step was removed"
        assert not gone & self.held, "a held step was removed"
        assert not gone & self.reading.keys(), "a step that is being read was removed"
        for step in gone:
            facts = before[step]
            fresh = abs(now - facts["saved_at"]) < JUST_SAVED_SECONDS
            assert facts["run"] == self.jobs[number]._run or not fresh, "what another job just saved was removed"
            del self.whole[step]

    @rule(
        number=st.integers(0, 1),
        saves=st.lists(
            st.tuples(
                st.integers(1, 12), st.sampled_from([0.1, 0.2, 0.3, float("nan")]), st.sampled_from([None, "milestone"])
            ),
            min_size=1,
            max_size=4,
        ),
        cut=st.none() | st.integers(0, 14),
    )
    def save(self, number: int, saves: list[tuple[int, float, str | None]], cut: int | None) -> None:
        """By one of the jobs, which may be killed in the midst of the last one or of the removals behind it."""
        for step, loss, user in saves[:-1]:
            self.save_one(number, step, loss, user, None)
        self.save_one(number, *saves[-1], cut)

    def save_one(self, number: int, step: int, loss: float, user: str | None, cut: int | None) -> None:
        job = self.jobs[number]
        before = dict(self.whole)
        self.power.left = cut
        with quiet_threads(), contextlib.suppress(Killed):
            job.save(step, {"w": torch.full((2,), float(step))}, metrics={"loss": loss}, user=user)
        with contextlib.suppress(Killed):
            job.wait()
        there = self.steps_there()
        if self.power.off:
            self.restart(number)
        if step in there:
            record = next(each for each in job_view(self.place) if each.step == step)
            if record.run == job._run or step not in before:
                assert record.saved_at is not None
                self.whole[step] = {"saved_at": record.saved_at, "run": record.run}
                self.ever = True
        self.power.left = None
        both = {**before, **self.whole}
        newest = max(both) if both else 0
        if both:
            gone = both.keys() - there
            assert newest not in gone, "the newest whole step was removed"
            assert step not in gone or step not in self.whole, "what was just saved was removed"
            assert not gone & self.held and not gone & self.reading.keys()
            for each in gone:
                fresh = abs(self.clock.time() - both[each]["saved_at"]) < JUST_SAVED_SECONDS
                assert both[each]["run"] == job._run or not fresh, "what another job just saved was removed"
                self.whole.pop(each, None)

    @precondition(lambda self: self.whole)
    @rule(number=st.integers(0, 1), cut=st.none() | st.integers(0, 8))
    def prune(self, number: int, cut: int | None) -> None:
        before, newest = dict(self.whole), max(self.whole)
        self.power.left = cut
        now = self.clock.time()
        with contextlib.suppress(Killed):
            self.jobs[number].prune()
        killed = self.power.off
        self.power.left, self.power.off = None, False
        self.pruned_by(number, before, newest, now)
        if killed:
            self.restart(number)

    @precondition(lambda self: self.whole)
    @rule(number=st.integers(0, 1), data=st.data())
    def hold(self, number: int, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.whole)))
        try:
            self.jobs[number].hold(step)
        except CheckpointNotFoundError as error:
            if "being removed" not in str(error):
                raise
            return
        self.held.add(step)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 1), data=st.data())
    def release(self, number: int, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.held)))
        self.jobs[number].release(step)
        self.held.discard(step)

    @precondition(lambda self: self.whole.keys() - self.reading.keys())
    @rule(data=st.data())
    def begin_to_read(self, data: st.DataObject) -> None:
        """A load of another process, which goes on until it ends or is killed."""
        step = data.draw(st.sampled_from(sorted(self.whole.keys() - self.reading.keys())))
        stack = contextlib.ExitStack()
        backend = stack.enter_context(open_backend(self.place))
        found = stack.enter_context(marked(backend, READING, f"step_{step:08d}"))
        if f"step_{step:08d}" in found.removing:
            stack.close()
            return
        self.reading[step] = stack

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def end_to_read(self, data: st.DataObject) -> None:
        self.reading.pop(data.draw(st.sampled_from(sorted(self.reading)))).close()

    @rule(seconds=st.sampled_from([-1e8, -3600.0, 1.0, 700.0, 3600.0, 7 * 3600.0, 1e8]))
    def time_passes_or_jumps(self, seconds: float) -> None:
        self.clock.offset += seconds

    @rule(number=st.integers(0, 1))
    def resume(self, number: int) -> None:
        state = {"w": torch.zeros(2)}
        # A removal that was cut off before the metadata went leaves a mark, for ten minutes.
        marked_steps = {record.step for record in job_view(self.place) if record.being_removed}
        candidates = self.whole.keys() - marked_steps
        if self.whole and not candidates:
            return
        step = self.jobs[number].load_latest(state)
        assert step == max(candidates, default=None)
        assert step is None or state["w"].tolist() == [float(step)] * 2

    @invariant()
    def one_is_whole_if_ever_one_was(self) -> None:
        if not hasattr(self, "place"):
            return
        there = self.steps_there()
        assert there == self.whole.keys()
        assert bool(there) == self.ever
        with open_backend(self.place) as backend:
            assert [backend.read(name) for name in FOREIGN] == [b"mine"] * len(FOREIGN)

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            for each in self.reading.values():
                each.close()
            self.stack.close()


class MemoryMachine(RunMachine):
    kind = GenericBackend

    def new_place(self) -> str:
        return f"memory://{uuid.uuid4().hex}"


def job_view(place: str) -> list[StepRecord]:
    """The run, as somebody sees it who takes no part."""
    looking = Checkpoints(place, signals=())
    try:
        return looking.records()
    finally:
        looking.close()


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """A killed process prints nothing: threads that are ended by `Killed` neither."""
    before = threading.excepthook
    threading.excepthook = lambda told: None if told.exc_type is Killed else before(told)
    try:
        yield
    finally:
        threading.excepthook = before


SETTINGS = settings(max_examples=EXAMPLES, stateful_step_count=15, deadline=None)
TestOnLocalFiles = RunMachine.TestCase
TestOnLocalFiles.settings = SETTINGS
TestInMemory = MemoryMachine.TestCase
TestInMemory.settings = SETTINGS
