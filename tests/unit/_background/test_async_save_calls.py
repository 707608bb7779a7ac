"""The call of `async_save`: what it refuses, what it answers, and what becomes of its worker."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import AsyncSaveResponse, FileSystemWriter, Metadata, StandardSavePlanner
from hpdcp._background._specs import WriterSpec
from hpdcp._base import config
from hpdcp._base.config import BackendSettings, Route
from hpdcp._base.errors import (
    HpdcpError,
    InvalidArgumentError,
    NotSupportedError,
    StateDictError,
    StorageError,
    WaitTimeoutError,
    WorkerDiedError,
)
from hpdcp._files.save_identity import SaveIdentity
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.storage import StorageWriter
from hpdcp._plan.write_results import WriteResults
from tests.support.workers import kill_worker, workers_of

SOON = 60.0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    PLANS.clear()
    yield
    assert hpdcp.wait_for_saves(SOON)


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((4,), value), "n": [value]}


def check(folder: Path, value: float) -> None:
    target = {"w": torch.zeros(4), "n": None}
    hpdcp.load(target, checkpoint_id=folder)
    assert target["w"].tolist() == [value] * 4
    assert target["n"] == [value]


def stopped_worker() -> int:
    """The process id of this process's worker, which does nothing until it is told to go on."""
    hpdcp.start_async_worker()
    (worker,) = workers_of()
    worker.send_signal(signal.SIGSTOP)
    return worker.pid


class Elsewhere(StorageWriter):
    """A writer without a location."""

    def configure_writer(self, context: PlannerContext) -> None: ...

    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        raise NotImplementedError

    def finalize_checkpoint(self, metadata: Metadata, results: Sequence[WriteResults]) -> Metadata:
        raise NotImplementedError


def test_a_save_without_a_place_is_refused_in_the_call() -> None:
    with pytest.raises(InvalidArgumentError, match="checkpoint_id"):
        hpdcp.async_save(state())
    with pytest.raises(ValueError, match="Elsewhere has none"):
        hpdcp.async_save(state(), storage_writer=Elsewhere())
    with pytest.raises(NotSupportedError, match="takes no checkpoint_id"):
        hpdcp.async_save(state(), storage_writer=Elsewhere(), checkpoint_id="anywhere")


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT"])
def test_gloo_without_a_meeting_place_is_refused_in_the_call(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv(variable)
    with pytest.raises(AssertionError, match=variable):
        hpdcp.async_save(state(), checkpoint_id=tmp_path, use_gloo=True)
    # Where nobody is met, none is needed.
    hpdcp.async_save(state(), checkpoint_id=tmp_path / "a", use_gloo=True, use_collectives=False).get_result(SOON)
    hpdcp.async_save(state(), checkpoint_id=tmp_path / "b", use_gloo=True, no_dist=True).get_result(SOON)


def test_a_state_that_cannot_be_stored_is_refused_in_the_call_and_not_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StateDictError, match="'lock'"), pytest.warns(UserWarning, match="no copier"):
        hpdcp.async_save({"lock": _Unstorable()}, checkpoint_id=tmp_path)
    hpdcp.async_save(state(), checkpoint_id=tmp_path).get_result(SOON)
    check(tmp_path, 1.0)


class _Unstorable:
    def __deepcopy__(self, memo: object) -> _Unstorable:
        return self

    def __reduce__(self) -> str:
        raise TypeError("it stays here")


def test_what_cannot_go_to_the_worker_is_refused_in_the_call(tmp_path: Path) -> None:
    class Local(StandardSavePlanner):
        def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            return super().build_global_plan(plans)

    with pytest.raises(InvalidArgumentError, match=r"planner is a .*Local that cannot be sent"):
        hpdcp.async_save(state(), checkpoint_id=tmp_path, planner=Local())

    class Slow(FileSystemWriter):
        pass

    with pytest.raises(InvalidArgumentError, match="storage_writer is a"):
        hpdcp.async_save(state(), storage_writer=Slow(tmp_path))


def test_a_planner_that_changes_only_its_own_ranks_plan_need_not_go_to_the_worker(tmp_path: Path) -> None:
    class WithoutN(StandardSavePlanner):
        def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
            super().configure_planner({key: value for key, value in state_dict.items() if key != "n"}, context)

    metadata = hpdcp.async_save(state(), checkpoint_id=tmp_path, planner=WithoutN()).get_result(SOON)
    assert list(metadata.state_dict_metadata) == ["w"]


def test_a_writer_arrives_with_its_arguments(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "a", backend="local", layout="safetensors")
    hpdcp.async_save(state(), storage_writer=writer).get_result(SOON)
    check(tmp_path / "a", 1.0)
    hpdcp.async_save(state(2.0), storage_writer=writer, checkpoint_id=tmp_path / "b").get_result(SOON)
    check(tmp_path / "b", 2.0)


def test_the_configuration_of_the_call_holds_in_the_worker(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "routes": [Route(str(tmp_path), "local", BackendSettings({"read_threads": 2}))],
        "backends": {"local": BackendSettings({"write_threads": 0})},
        "keep_replaced_for": 1000.0,
    }
    hpdcp.async_save(state(), checkpoint_id=tmp_path).get_result(SOON)
    before = {path.name for path in tmp_path.glob("_rank*")}
    with config.using(**settings):
        response = hpdcp.async_save(state(2.0), checkpoint_id=tmp_path)
    response.get_result(SOON)
    assert before < {path.name for path in tmp_path.glob("_rank*")}
    hpdcp.async_save(state(3.0), checkpoint_id=tmp_path).get_result(SOON)
    check(tmp_path, 3.0)
    assert len(list(tmp_path.glob("_rank*"))) == len(before)


def test_a_configuration_that_cannot_be_sent_is_refused_in_the_call(tmp_path: Path) -> None:
    with (
        config.using(backends={"s3": BackendSettings(storage_options={"session": threading.Lock()})}),
        pytest.raises(InvalidArgumentError, match=r"the configuration is a .* cannot be sent"),
    ):
        hpdcp.async_save(state(), checkpoint_id=tmp_path)


@pytest.mark.parametrize("options", [{"a": (1, 2)}, {"a": {1: "b"}}, {"a": b"bytes"}, {"a": [1, None, {"b": 2.5}]}])
def test_options_of_a_writer_arrive_as_they_are(options: dict[str, object], tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, storage_options=options)
    identity = SaveIdentity("0" * 16, "run", 1)
    opened = WriterSpec.of(writer).open(identity)
    assert isinstance(opened, FileSystemWriter)
    assert opened.arguments() == writer.arguments()
    assert opened.identity == identity


def test_a_wait_that_takes_too_long_leaves_the_save_running(tmp_path: Path) -> None:
    worker = stopped_worker()
    try:
        response = hpdcp.async_save(state(), checkpoint_id=tmp_path)
        with pytest.raises(WaitTimeoutError, match="it goes on"):
            response.get_result(0.1)
        with pytest.raises(FutureTimeoutError):
            response.persist_completion.result(0.1)
        assert not response.done()
        assert not response.persist_completion.cancel()
        assert not hpdcp.wait_for_saves(0.1)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert hpdcp.wait_for_saves(SOON)
    assert response.done()
    assert response.get_result(0).to_bytes() == (tmp_path / ".metadata").read_bytes()


def test_a_killed_worker_is_reported_soon_and_the_next_call_starts_another(tmp_path: Path) -> None:
    hpdcp.async_save(state(), checkpoint_id=tmp_path).get_result(SOON)
    worker = stopped_worker()
    response = hpdcp.async_save(state(2.0), checkpoint_id=tmp_path)
    os.kill(worker, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match="signal 9"):
        response.get_result(SOON)
    assert time.monotonic() - began < 10
    check(tmp_path, 1.0)
    hpdcp.async_save(state(3.0), checkpoint_id=tmp_path).get_result(SOON)
    check(tmp_path, 3.0)
    (new,) = workers_of()
    assert new.pid != worker


def test_a_worker_killed_between_saves_is_replaced_without_a_word(tmp_path: Path) -> None:
    hpdcp.async_save(state(), checkpoint_id=tmp_path).get_result(SOON)
    kill_worker()
    hpdcp.async_save(state(2.0), checkpoint_id=tmp_path).get_result(SOON)
    check(tmp_path, 2.0)
    assert len(PLANS) == 1


def test_an_error_of_the_worker_comes_with_its_class_and_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    response = hpdcp.async_save(state(), checkpoint_id=tmp_path / "file" / "ckpt")
    with pytest.raises(StorageError) as caught:
        response.get_result(SOON)
    assert str(tmp_path / "file") in str(caught.value)
    assert any("background worker" in note and "Traceback" in note for note in caught.value.__notes__)
    # The same error as often as it is asked for; and since somebody asked, the next call goes on.
    assert response.persist_completion.exception() is caught.value
    hpdcp.async_save(state(), checkpoint_id=tmp_path / "ckpt").get_result(SOON)


def test_a_failure_that_nobody_asked_about_raises_once_in_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    hpdcp.async_save(state(), checkpoint_id=tmp_path / "file" / "ckpt")
    with pytest.raises(StorageError, match="file"):
        hpdcp.async_save(state(), checkpoint_id=tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()
    hpdcp.async_save(state(), checkpoint_id=tmp_path / "ckpt").get_result(SOON)


def test_a_call_waits_for_the_save_before_it_and_says_how_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hpdcp")
    worker = stopped_worker()
    first = hpdcp.async_save(state(), checkpoint_id=tmp_path / "1")
    threading.Timer(0.5, lambda: os.kill(worker, signal.SIGCONT)).start()
    began = time.monotonic()
    second = hpdcp.async_save(state(2.0), checkpoint_id=tmp_path / "2")
    assert time.monotonic() - began > 0.4
    assert first.done()
    assert any("waited" in message and "seconds" in message for message in caplog.messages)
    second.get_result(SOON)
    check(tmp_path / "1", 1.0)
    check(tmp_path / "2", 2.0)


def test_a_callback_runs_once_and_a_done_callback_of_the_future_does_too(tmp_path: Path) -> None:
    calls: list[str] = []
    response = hpdcp.async_save(state(), checkpoint_id=tmp_path, callback=lambda: calls.append("callback"))
    response.persist_completion.add_done_callback(lambda future: calls.append("future"))
    assert isinstance(response, AsyncSaveResponse)
    assert hpdcp.wait_for_saves(SOON)
    assert sorted(calls) == ["callback", "future"]


def test_a_callback_may_save(tmp_path: Path) -> None:
    """Such as a copy to a second place, from the thread that the callback runs in."""
    done = threading.Event()

    def copy() -> None:
        hpdcp.save(state(5.0), checkpoint_id=tmp_path / "2", no_dist=True)
        done.set()

    hpdcp.async_save(state(), checkpoint_id=tmp_path / "1", callback=copy).get_result(SOON)
    assert done.wait(SOON)
    check(tmp_path / "2", 5.0)


def test_one_worker_serves_save_after_save_and_sees_no_device(tmp_path: Path) -> None:
    hpdcp.start_async_worker()
    hpdcp.start_async_worker()
    pids = set()
    for turn in range(3):
        hpdcp.async_save(state(float(turn)), checkpoint_id=tmp_path).get_result(SOON)
        pids |= {worker.pid for worker in workers_of()}
    assert len(pids) == 1
    environment = Path(f"/proc/{pids.pop()}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=" in environment
    assert b"ASCEND_RT_VISIBLE_DEVICES=" in environment


def test_interrupts_meant_for_the_trainer_do_not_reach_the_save(tmp_path: Path) -> None:
    hpdcp.start_async_worker()
    response = hpdcp.async_save(state(), checkpoint_id=tmp_path)
    for sent in (signal.SIGINT, signal.SIGTERM):
        workers_of()[0].send_signal(sent)
    response.get_result(SOON)
    check(tmp_path, 1.0)
    hpdcp.async_save(state(2.0), checkpoint_id=tmp_path).get_result(SOON)


def test_calls_from_several_threads_take_turns(tmp_path: Path) -> None:
    responses: dict[int, AsyncSaveResponse] = {}

    def call(number: int) -> None:
        responses[number] = hpdcp.async_save(state(float(number)), checkpoint_id=tmp_path / str(number))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, response in responses.items():
        response.get_result(SOON)
        check(tmp_path / str(number), float(number))


def test_importing_hpdcp_starts_no_worker() -> None:
    code = "import hpdcp, subprocess; subprocess.Popen = None; hpdcp.async_save; hpdcp.wait_for_saves(); print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "fine\n"


def test_errors_of_a_worker_are_errors_of_hpdcp() -> None:
    assert issubclass(WorkerDiedError, HpdcpError)
    assert issubclass(WaitTimeoutError, TimeoutError)
