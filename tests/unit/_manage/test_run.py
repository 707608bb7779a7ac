"""The checkpoints of a run in one process: what is saved, found, passed over, kept and removed."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import keep
from hpdcp._base.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidArgumentError,
    MissingKeysError,
    StateDictError,
    StorageError,
    UnsupportedFormatError,
)
from hpdcp._format import metadata as metadata_format
from hpdcp._format.file_names import LEASE, METADATA
from hpdcp._manage import retention
from hpdcp._manage._marks import EXPIRES, MARKS, READING, held_key
from hpdcp._manage._run_folder import RunFolder
from hpdcp._manage.run import Checkpoints
from hpdcp._manage.step_record import StepRecord, StepState
from hpdcp_backends.local import LocalBackend

OpenRun = Callable[..., Checkpoints]


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[OpenRun]:
    """Makes a run that saves in the call, in one folder."""
    opened: list[Checkpoints] = []

    def make(**options: Any) -> Checkpoints:
        opened.append(Checkpoints(tmp_path / "run", **{"asynchronous": False, **options}))
        return opened[-1]

    yield make
    for each in reversed(opened):
        each.close()


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((4,), float(step)), "step": step}


def save_all(run: Checkpoints, *steps: int, **metrics: float) -> None:
    for step in steps:
        run.save(step, state_at(step), metrics=metrics)
    run.wait()


def loaded(run: Checkpoints, **options: Any) -> int | None:
    """The newest step, once it is certain that the state is that step's."""
    state = {"w": torch.zeros(4), "step": -1}
    step = run.load_latest(state, **options)
    if step is not None:
        assert state["w"].tolist() == [float(step)] * 4
        assert state["step"] == step
    return step


def folders(run: Checkpoints) -> list[str]:
    return sorted(path.name for path in Path(run.location).iterdir() if not path.name.startswith("."))


def folder_of(run: Checkpoints, step: int) -> Path:
    return Path(run.location, f"step_{step:08d}")


def test_a_run_begins_with_nothing_and_goes_on_from_the_newest_step(open_run: OpenRun) -> None:
    run = open_run()
    assert (loaded(run), run.steps(), run.latest(), run.best("loss")) == (None, [], None, None)
    save_all(run, 1, 2, 30)
    assert folders(run) == ["step_00000001", "step_00000002", "step_00000030"]
    again = open_run()
    assert (loaded(again), again.steps(), again.latest()) == (30, [1, 2, 30], 30)


def test_a_step_is_an_ordinary_checkpoint(open_run: OpenRun) -> None:
    run = open_run()
    save_all(run, 7)
    state = {"w": torch.zeros(4)}
    hpdcp.load(state, checkpoint_id=folder_of(run, 7))
    assert state["w"].tolist() == [7.0] * 4


def test_metrics_and_the_users_json_come_back_from_the_checkpoints_metadata(open_run: OpenRun) -> None:
    run = open_run()
    before = time.time()
    metrics = {"loss": torch.tensor(0.5, requires_grad=True), "nan": float("nan"), "inf": float("inf"), "n": 3}
    run.save(5, state_at(5), metrics=metrics, user={"lr": [0.1, None], "name": "ä"})
    (found,) = open_run().records()
    assert found.metrics["loss"] == 0.5 and found.metrics["n"] == 3.0 and found.metrics["inf"] == float("inf")
    assert found.metrics["nan"] != found.metrics["nan"]
    assert found.user == {"lr": [0.1, None], "name": "ä"}
    assert found.saved_at is not None and before <= found.saved_at <= time.time()
    assert (found.ranks, found.state, found.held) == (1, StepState.WHOLE, False)


def test_facts_of_one_step_are_not_those_of_the_next_though_its_plan_is(open_run: OpenRun) -> None:
    run = open_run()
    for step in (1, 2):
        run.save(step, state_at(step), metrics={"loss": step / 10})
    assert [record.metrics["loss"] for record in run.records()] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"metrics": {"loss": "low"}}, "expected a name and a number"),
        ({"metrics": {"loss": torch.ones(2)}}, "expected a name and a number"),
        ({"metrics": [1]}, "expected a dict"),
        ({"user": object()}, "not JSON"),
        ({"user": float("nan")}, "not JSON"),
        ({"user": "x" * 9000}, "at most 8192"),
    ],
)
def test_what_cannot_be_kept_beside_a_checkpoint_is_refused(
    open_run: OpenRun, options: dict[str, Any], what: str
) -> None:
    run = open_run()
    with pytest.raises(InvalidArgumentError, match=what):
        run.save(1, state_at(1), **options)
    assert run.steps() == []


@pytest.mark.parametrize("step", [-1, 1.0, "5", True, None])
def test_a_step_is_a_whole_number(open_run: OpenRun, step: Any) -> None:
    run = open_run()
    for action in (run.due, run.hold, lambda step: run.save(step, {})):
        with pytest.raises(InvalidArgumentError, match="whole number from 0"):
            action(step)


def test_the_best_step_is_told_in_the_direction_that_the_policy_has(open_run: OpenRun) -> None:
    run = open_run(keep=keep.latest(5) | keep.best("loss", 2, lowest=True))
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        run.save(step, state_at(step), metrics={"loss": loss})
    assert (run.best("loss"), run.best("loss", lowest=False), run.best("other")) == (2, 3, None)
    assert open_run().best("loss") == 3


def test_only_what_the_policy_keeps_stays(open_run: OpenRun) -> None:
    run = open_run(keep=keep.latest(2) | keep.every(10))
    save_all(run, 9, 10, 11, 12, 13)
    assert run.steps() == [10, 12, 13]
    assert folders(run) == ["step_00000010", "step_00000012", "step_00000013"]


def test_saves_in_the_background_are_kept_alike(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run", keep=keep.latest(1), every=2) as run:
        for step in range(1, 7):
            if run.due(step):
                run.save(step, state_at(step), metrics={"loss": 1 / step})
    again = Checkpoints(tmp_path / "run", signals=())
    assert again.steps() == [6]
    assert loaded(again, verify=True) == 6
    again.close()


def test_a_held_step_stays_until_it_is_released_by_whichever_job(open_run: OpenRun) -> None:
    run = open_run(keep=keep.latest(1))
    save_all(run, 1)
    run.hold(1)
    run.hold(1)
    save_all(run, 2, 3)
    assert run.steps() == [1, 3]
    assert [record.held for record in run.records()] == [True, False]
    other = open_run()
    with pytest.raises(CheckpointError, match="is held: release it first"):
        other.remove(1)
    other.release(1)
    other.release(1)
    save_all(run, 4)
    assert run.steps() == [4]
    with pytest.raises(CheckpointNotFoundError, match="no step 1; whole steps are 4"):
        run.hold(1)


def test_a_step_that_a_load_reads_stays(open_run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(keep=keep.latest(1))
    save_all(run, 1)
    entered, go_on = threading.Event(), threading.Event()
    read_ranges = LocalBackend.read_ranges

    def slowly(self: LocalBackend, key: str, *rest: Any) -> None:
        if threading.current_thread().name == "reader" and key.startswith("_rank0_"):
            entered.set()
            assert go_on.wait(60)
        read_ranges(self, key, *rest)

    monkeypatch.setattr(LocalBackend, "read_ranges", slowly)
    reading = open_run(signals=())
    found: list[int | None] = []
    reader = threading.Thread(target=lambda: found.append(loaded(reading)), name="reader")
    reader.start()
    assert entered.wait(60)
    save_all(run, 2, 3)
    assert [(record.step, record.being_read) for record in run.records()] == [(1, True), (3, False)]
    with pytest.raises(CheckpointError, match="being read"):
        run.remove(1)
    go_on.set()
    reader.join()
    assert found == [1]
    save_all(run, 4)
    assert run.steps() == [4]
    assert not Path(run.location, MARKS).exists()


def test_the_mark_of_a_reader_that_was_killed_expires_and_goes(open_run: OpenRun) -> None:
    run = open_run(keep=keep.latest(1))
    save_all(run, 1)
    mark = Path(run.location, MARKS, f"{READING}-step_00000001.{'0' * 16}")
    mark.parent.mkdir()
    for age in (-EXPIRES[READING] - 9, EXPIRES[READING] + 9):
        mark.touch()
        os.utime(mark, (time.time() - age,) * 2)
        assert not run.records()[0].being_read, "whichever way a clock has jumped"
    save_all(run, 2)
    assert run.steps() == [2]
    assert not mark.exists()


def test_a_step_that_is_being_removed_is_not_begun_to_be_read_or_held(open_run: OpenRun) -> None:
    run = open_run()
    save_all(run, 1, 2)
    mark = Path(run.location, MARKS, f"removing-step_00000002.{'0' * 16}")
    mark.parent.mkdir()
    mark.touch()
    assert loaded(run) == 1
    for action in (lambda: run.hold(2), lambda: run.load(2, state_at(0))):
        with pytest.raises(CheckpointNotFoundError, match="being removed"):
            action()
    assert not Path(run.location, held_key("step_00000002")).exists()
    os.utime(mark, (time.time() - 3600,) * 2)
    assert loaded(run) == 2, "whoever removed it was killed before the metadata went"


def test_what_no_run_saved_is_loaded_and_never_removed(open_run: OpenRun, tmp_path: Path) -> None:
    run = open_run(keep=keep.latest(1))
    hpdcp.save(state_at(3), checkpoint_id=folder_of(run, 3))
    Path(run.location, "step_00000004").mkdir()
    Path(run.location, "step_00000004", "notes.txt").write_text("mine")
    Path(run.location, "step_final").mkdir()
    assert loaded(run) == 3
    save_all(run, 5, 6)
    assert run.steps() == [3, 6]
    assert folders(run) == ["step_00000003", "step_00000004", "step_00000006", "step_final"]


def test_a_users_file_in_a_superfluous_step_stays(open_run: OpenRun) -> None:
    run = open_run(keep=keep.latest(1))
    save_all(run, 1)
    notes = folder_of(run, 1) / "notes.txt"
    notes.write_text("mine")
    save_all(run, 2)
    assert run.steps() == [2]
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]
    save_all(run, 3)
    assert run.steps() == [3]


def test_a_renamed_step_is_told_and_neither_loaded_nor_removed(
    open_run: OpenRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_run(keep=keep.latest(1))
    save_all(run, 1, 2)
    folder_of(run, 2).rename(folder_of(run, 9))
    save_all(run, 3)
    caplog.clear()
    assert loaded(run) == 3
    assert "records that it is step 2: was the folder renamed?" in caplog.text
    save_all(run, 4)
    assert folder_of(run, 9).exists()


def test_a_run_whose_folder_was_moved_goes_on(open_run: OpenRun, tmp_path: Path) -> None:
    save_all(open_run(), 1, 2)
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = Checkpoints(tmp_path / "moved", asynchronous=False)
    assert loaded(moved) == 2
    moved.close()


def test_steps_with_other_zeros_in_front_are_found(open_run: OpenRun) -> None:
    run = open_run(name="step_{step}")
    save_all(run, 12)
    assert folders(run) == ["step_12"]
    assert loaded(open_run()) == 12


@pytest.mark.parametrize(
    "name", ["step", "{step}/x", "{step}_{step}", "step_{}", "step_{step:x}", "{step}{rank}", ".."]
)
def test_a_name_has_the_step_in_it_once(open_run: OpenRun, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected the name of one folder"):
        open_run(name=name)


def truncate(folder: Path) -> None:
    data = next(path for path in folder.iterdir() if path.suffix == ".safetensors")
    data.write_bytes(data.read_bytes()[:-1])


def lose(folder: Path) -> None:
    next(path for path in folder.iterdir() if path.suffix == ".bytes").unlink()


def spoil_metadata(folder: Path) -> None:
    data = bytearray((folder / METADATA).read_bytes())
    data[-1] ^= 1
    (folder / METADATA).write_bytes(data)


def spoil_header(folder: Path) -> None:
    (folder / METADATA).write_bytes(b"\xff" * 40)


def tear(folder: Path) -> None:
    (folder / METADATA).unlink()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (tear, "its save ended before it committed"),
        (truncate, "bytes long, recorded were"),
        (lose, "is missing"),
        (spoil_metadata, "is damaged"),
        (spoil_header, "its header cannot be read"),
    ],
)
def test_a_step_that_is_not_sound_is_passed_over_with_the_reason(
    open_run: OpenRun, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], why: str
) -> None:
    run = open_run()
    save_all(run, 1, 2)
    damage(folder_of(run, 2))
    assert loaded(run) == 1
    (warning,) = [each for each in caplog.records if "passed over" in each.message]
    assert warning.levelno == logging.WARNING and "step_00000002" in warning.message and why in warning.message


def flip(folder: Path) -> None:
    data = next(path for path in folder.iterdir() if path.suffix == ".safetensors")
    spoiled = bytearray(data.read_bytes())
    spoiled[-1] ^= 1
    data.write_bytes(spoiled)


def test_checksums_are_read_first_where_that_is_asked_for(open_run: OpenRun, caplog: pytest.LogCaptureFixture) -> None:
    run = open_run()
    save_all(run, 1, 2)
    flip(folder_of(run, 2))
    assert loaded(run, verify=True) == 1
    assert "passed over" in caplog.text and "damaged" in caplog.text


def test_damage_that_shows_while_it_is_read_is_passed_over_too(open_run: OpenRun) -> None:
    run = open_run()
    save_all(run, 1, 2)
    flip(folder_of(run, 2))
    with hpdcp.config.using(verify="always"):
        assert loaded(run) == 1


def test_a_run_of_which_nothing_is_sound_is_not_begun_anew(open_run: OpenRun) -> None:
    run = open_run()
    save_all(run, 1, 2)
    for step in (1, 2):
        truncate(folder_of(run, step))
    with pytest.raises(CorruptCheckpointError, match=r"none can be loaded .*step 2: .*step 1: .*give another location"):
        loaded(run)


def test_saves_that_never_finished_are_no_loss(open_run: OpenRun) -> None:
    run = open_run()
    save_all(run, 1)
    tear(folder_of(run, 1))
    assert loaded(run) is None
    save_all(run, 1)
    assert loaded(run) == 1


def test_a_checkpoint_of_a_newer_version_is_an_error(open_run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run()
    save_all(run, 1)
    with monkeypatch.context() as newer:
        newer.setattr(metadata_format, "FORMAT_VERSION", (9, 0))
        save_all(run, 2)
    with pytest.raises(UnsupportedFormatError, match="Upgrade hpdcp"):
        loaded(run)


def test_a_state_that_does_not_fit_is_an_error_and_no_reason_to_go_back(open_run: OpenRun) -> None:
    run = open_run()
    save_all(run, 1)
    with pytest.raises(MissingKeysError):
        run.load_latest({"other": torch.zeros(1)})


def test_a_store_that_cannot_be_listed_is_an_error_and_no_new_run(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: LocalBackend) -> list[str]:
        raise StorageError("the store is away")

    run = open_run()
    monkeypatch.setattr(LocalBackend, "list_folders", fails)
    with pytest.raises(StorageError, match="away"):
        loaded(run)


def test_what_a_killed_save_left_of_an_older_step_goes_where_its_process_is_known_to_have_ended(
    open_run: OpenRun,
) -> None:
    run = open_run(keep=keep.latest(3))
    save_all(run, 1, 2, 5)
    tear(folder_of(run, 1))
    tear(folder_of(run, 5))
    save_all(run, 3)
    assert folders(run) == ["step_00000002", "step_00000003", "step_00000005"]
    assert run.records()[-1].state is StepState.TORN


def test_what_a_save_of_unknown_fate_left_goes_once_it_is_old_and_below_a_whole_step(
    open_run: OpenRun,
) -> None:
    run = open_run(keep=keep.latest(3))
    save_all(run, 1, 2, 5)
    for step, age in ((1, 3600.0), (2, 48 * 3600.0), (5, 48 * 3600.0)):
        tear(folder_of(run, step))
        for path in folder_of(run, step).iterdir():
            if path.name == LEASE:
                said = json.loads(path.read_text())
                path.write_text(json.dumps({**said, "began": said["began"] - age, "process": None}))
            os.utime(path, (time.time() - age,) * 2)
    save_all(run, 3)
    assert folders(run) == ["step_00000001", "step_00000003", "step_00000005"]
    assert [record.state for record in run.records()] == [StepState.SAVING, StepState.WHOLE, StepState.TORN]


def test_a_removal_that_was_cut_off_is_finished_by_the_next_one(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(keep=keep.latest(1))
    save_all(run, 1)
    delete = LocalBackend.delete

    def dies(self: LocalBackend, keys: Any) -> None:
        keys = list(keys)
        delete(self, keys)
        if METADATA in keys:
            raise StorageError("cut off")

    with monkeypatch.context() as cut:
        cut.setattr(LocalBackend, "delete", dies)
        save_all(run, 2)
    assert [(record.step, record.why) for record in run.records()] == [(1, "its removal was cut off"), (2, "")]
    save_all(run, 3)
    assert folders(run) == ["step_00000003"]


def test_what_is_the_newest_after_the_newest_has_gone_stays(open_run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(keep=keep.latest(1))
    save_all(open_run(), 1, 2)
    look = RunFolder.look
    looks: list[list[StepRecord]] = []

    def then_somebody_removes_it(self: RunFolder) -> list[StepRecord]:
        answer = look(self)
        if not looks:
            tear(folder_of(run, 2))
        looks.append(answer)
        return answer

    with monkeypatch.context() as racing:
        racing.setattr(RunFolder, "look", then_somebody_removes_it)
        done = run.prune()
    assert (done.removed, done.kept) == ((), {1: "the newest"})
    assert len(looks) == 2
    assert run.steps() == [1]


def test_a_step_that_went_by_other_hands_is_not_remembered_as_whole(open_run: OpenRun) -> None:
    run = open_run(keep=keep.latest(2))
    save_all(run, 1, 2)
    tear(folder_of(run, 2))
    save_all(run, 1)
    assert run.steps() == [1]
    save_all(run, 3)
    assert run.steps() == [1, 3]


def test_a_step_that_is_saved_anew_after_it_was_judged_stays(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(keep=keep.latest(1))
    save_all(open_run(), 1, 2)
    reasons = retention.reasons_to_keep

    def then_it_is_saved_anew(*arguments: Any, **options: Any) -> dict[int, str]:
        answer = reasons(*arguments, **options)
        save_all(open_run(), 1)
        return answer

    monkeypatch.setattr("hpdcp._manage.prune.reasons_to_keep", then_it_is_saved_anew)
    done = run.prune()
    assert done.removed == () and "saved anew" in done.left[1]
    assert run.steps() == [1, 2]


def test_pruning_says_what_it_would_do_and_why_the_rest_stays(open_run: OpenRun) -> None:
    save_all(open_run(), 1, 2, 3)
    run = open_run(keep=keep.every(2))
    planned = run.prune(dry_run=True)
    assert planned.removed == (1,) and planned.dry_run and planned.nbytes > 0
    assert planned.kept == {2: "every(2)", 3: "the newest"}
    assert run.steps() == [1, 2, 3]
    done = run.prune()
    assert (done.removed, done.nbytes, run.steps()) == ((1,), planned.nbytes, [2, 3])
    with pytest.raises(InvalidArgumentError, match="keeps every step"):
        open_run().prune()


def test_two_that_prune_at_once_by_other_policies_leave_the_newest_and_raise_nothing(open_run: OpenRun) -> None:
    first = open_run()
    for step in range(1, 9):
        first.save(step, state_at(step), metrics={"loss": step})
    pruners = [open_run(keep=policy, signals=()) for policy in (keep.latest(1), keep.best("loss", 1, lowest=True))]
    together = threading.Barrier(2)
    failed: list[BaseException] = []

    def prune(run: Checkpoints) -> None:
        together.wait()
        try:
            run.prune()
        except BaseException as error:  # noqa: BLE001  # for the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=prune, args=(run,)) for run in pruners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert first.latest() == 8
    for run in pruners:
        run.prune()
    assert first.steps() == [8]
    assert folders(first) == ["step_00000008"]


def test_a_given_step_is_loaded_or_what_there_is_is_told(open_run: OpenRun) -> None:
    run = open_run()
    save_all(run, 1, 2, 3)
    state = state_at(0)
    run.load(2, state)
    assert state["step"] == 2
    with pytest.raises(CheckpointNotFoundError, match="no step 7; whole steps are 1, 2, 3"):
        run.load(7, state)
    tear(folder_of(run, 2))
    with pytest.raises(CheckpointNotFoundError, match="step 2 is not whole: its save ended"):
        run.load(2, state)


def test_a_step_is_removed_when_told_so_whatever_the_policy_says(open_run: OpenRun) -> None:
    run = open_run()
    save_all(run, 1, 2)
    run.remove(2)
    assert run.steps() == [1]
    with pytest.raises(CheckpointNotFoundError, match="has no step 2"):
        run.remove(2)


def test_steps_are_due_by_number_time_and_the_users_word(open_run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [step for step in range(12) if open_run(every=5).due(step)] == [5, 10]
    assert not any(open_run().due(step) for step in range(12))
    now = [1000.0]
    monkeypatch.setattr("hpdcp._manage._schedule.time.monotonic", lambda: now[0])
    run = open_run(every=timedelta(seconds=30))
    due = []
    for step in range(1, 10):
        now[0] += 10
        if run.due(step):
            run.save(step, state_at(step))
            due.append(step)
    assert due == [3, 6, 9]
    asked: list[tuple[int, float]] = []
    run = open_run(when=lambda step, seconds: not asked.append((step, seconds)) and seconds > 15)
    assert [run.due(step) for step in (1, 2)] == [False, False]
    now[0] += 16
    assert run.due(3)
    assert asked == [(1, 0.0), (2, 0.0), (3, 16.0)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 0.5}, "a timedelta"),
        ({"every": timedelta()}, "a timedelta"),
        ({"when": 5}, "expected a function"),
        ({"keep": 3}, "keep is"),
        ({"on_failure": "ignore"}, "'raise' or 'warn'"),
        ({"max_failures": 0}, "whole number from 1"),
        ({"signal_interval": 0}, "whole number from 1"),
        ({"signals": ["TERM"]}, "expected signals"),
        ({"asynchronous": "no"}, "expected True or False"),
    ],
)
def test_arguments_of_another_kind_are_refused(open_run: OpenRun, options: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=what):
        open_run(**options)


def test_a_signal_makes_the_next_step_due_once_and_stops_the_run(open_run: OpenRun) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        run = open_run(signals=(signal.SIGUSR1, signal.SIGTERM))
        assert (run.due(1), run.stopping) == (False, False)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert not run.stopping, "not before all ranks have agreed"
        assert (run.due(2), run.stopping) == (True, True)
        assert (run.due(3), run.stopping) == (False, True)
        assert came == [signal.SIGUSR1], "the handler that was there is called as well"
        run.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_somebody_set_later_is_left_alone(open_run: OpenRun) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    run = open_run(signals=(signal.SIGUSR1,))
    theirs = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        run.close()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert callable(theirs)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_are_watched_from_the_main_thread_only(tmp_path: Path) -> None:
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            Checkpoints(tmp_path)
        except InvalidArgumentError as error:
            errors.append(str(error))
        Checkpoints(tmp_path, signals=()).close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "signals=()" in errors[0]


class Failing:
    """Makes the publication of metadata fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = True
        publish = LocalBackend.publish

        def fail(backend: LocalBackend, key: str, data: bytes) -> None:
            if self.fails and key == METADATA:
                raise StorageError("the store is away")
            publish(backend, key, data)

        monkeypatch.setattr(LocalBackend, "publish", fail)


def test_a_failed_save_is_raised_at_once_where_it_is_made_in_the_call(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch)
    run = open_run()
    with pytest.raises(StorageError, match="away"):
        run.save(1, state_at(1))
    failing.fails = False
    save_all(run, 2)
    assert run.steps() == [2]


def test_training_goes_on_over_failures_until_they_are_too_many(
    open_run: OpenRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(monkeypatch)
    run = open_run(on_failure="warn", max_failures=3)
    for step in (1, 2, 3):
        run.save(step, state_at(step))
    failing.fails = False
    save_all(run, 4)
    assert [each.message[:20] for each in caplog.records if "was not saved" in each.message] == [
        "step 1 was not saved", "step 2 was not saved", "step 3 was not saved",
    ]  # fmt: skip
    assert run.steps() == [4]
    failing.fails = True
    for step in (5, 6, 7, 8):
        run.save(step, state_at(step))
    with pytest.raises(StorageError, match="away") as raised:
        run.save(9, state_at(9))
    assert any("4 saves of this run have failed in a row" in note for note in raised.value.__notes__)
    failing.fails = False


def test_what_is_wrong_with_the_state_is_raised_whatever_may_fail(open_run: OpenRun) -> None:
    run = open_run(on_failure="warn")
    with pytest.raises(StateDictError):
        run.save(1, {"a.b": 1, "a": {"b": 2}})


def test_a_with_block_left_by_an_error_raises_that_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path / "run") as run:
        run.save(1 // (0 if run.save(1, state_at(1)) else 1), state_at(1))
    assert signal.getsignal(signal.SIGTERM) is before
    assert Checkpoints(tmp_path / "run", signals=()).steps() == [1]


def test_memory_serves_a_run_that_saves_in_the_call() -> None:
    with Checkpoints("memory://a-run", asynchronous=False, keep=keep.latest(2)) as run:
        save_all(run, 1, 2, 3)
        assert run.steps() == [2, 3]
        assert loaded(run) == 3
