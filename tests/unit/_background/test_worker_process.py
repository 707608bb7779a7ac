"""One worker serves save after save; it is started when needed, and again when it was killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpdcp
from hpdcp import AsyncSaveResponse
from hpdcp._base.errors import (
    WorkerDiedError,
)
from hpdcp._base.saves_in_flight import wait_for_saves_to
from hpdcp._plan.plan_cache import PLANS
from tests.support.small_saves import SOON, check, state, stopped_worker
from tests.support.workers import kill_worker, workers_of
from tests.support.writers import LastWriter

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    PLANS.clear()
    yield
    assert hpdcp.wait_for_saves(SOON)


def test_importing_hpdcp_starts_no_worker() -> None:
    code = "import hpdcp, subprocess; subprocess.Popen = None; hpdcp.async_save; hpdcp.wait_for_saves(); print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "fine\n"


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


@pytest.mark.parametrize("use_collectives", [True, False])
def test_a_worker_killed_when_it_has_published_has_saved(tmp_path: Path, use_collectives: bool) -> None:
    called = threading.Event()
    response = hpdcp.async_save(
        state(2.0), storage_writer=LastWriter(tmp_path), callback=called.set, use_collectives=use_collectives
    )
    metadata = response.get_result(SOON)
    assert called.wait(SOON)
    name = ".metadata" if use_collectives else "0.metadata"
    assert (tmp_path / name).read_bytes() == metadata.to_bytes()
    check(tmp_path, 2.0)
    hpdcp.async_save(state(3.0), checkpoint_id=tmp_path, use_collectives=use_collectives).get_result(SOON)
    check(tmp_path, 3.0)


def test_a_worker_killed_between_saves_is_replaced_without_a_word(tmp_path: Path) -> None:
    hpdcp.async_save(state(), checkpoint_id=tmp_path).get_result(SOON)
    kill_worker()
    hpdcp.async_save(state(2.0), checkpoint_id=tmp_path).get_result(SOON)
    check(tmp_path, 2.0)
    assert len(PLANS) == 1


def test_interrupts_meant_for_the_trainer_do_not_reach_the_save(tmp_path: Path) -> None:
    hpdcp.start_async_worker()
    response = hpdcp.async_save(state(), checkpoint_id=tmp_path)
    for sent in (signal.SIGINT, signal.SIGTERM):
        workers_of()[0].send_signal(sent)
    response.get_result(SOON)
    check(tmp_path, 1.0)
    hpdcp.async_save(state(2.0), checkpoint_id=tmp_path).get_result(SOON)


@pytest.mark.parametrize("number", ["HUP", "USR1", "USR2", "TERM", "INT", "QUIT"])
def test_what_a_scheduler_sends_to_all_processes_does_not_end_a_worker_that_is_starting(number: str) -> None:
    code = (
        "import os, signal, torch, hpdcp, time; from tests.support.workers import workers_of\n"
        f"signal.signal(signal.SIG{number}, lambda *_: None)\n"
        "r = hpdcp.async_save({'w': torch.ones(2)}, checkpoint_id=os.environ['FOLDER'])\n"
        f"for _ in range(40): os.killpg(0, signal.SIG{number}); workers_of()[0].send_signal(signal.SIG{number}); "
        "time.sleep(0.02)\n"
        "r.get_result(60); print(os.getsid(workers_of()[0].pid) != os.getsid(0))"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"FOLDER": folder}, capture_output=True, text=True,
            timeout=90, start_new_session=True, cwd=ROOT,
        )  # fmt: skip
    assert done.stdout == "True\n", done.stderr


def test_who_waits_for_a_location_waits_for_the_save_in_flight_there_only(tmp_path: Path) -> None:
    worker = stopped_worker()
    response = hpdcp.async_save(state(), checkpoint_id=tmp_path / "a")
    wait_for_saves_to(f"{tmp_path}/b")
    waited = threading.Thread(target=wait_for_saves_to, args=(f"{response.checkpoint}/",))
    waited.start()
    waited.join(0.3)
    assert waited.is_alive()
    os.kill(worker, signal.SIGCONT)
    waited.join(SOON)
    response.get_result(SOON)
    check(tmp_path / "a", 1.0)


def test_a_callback_may_use_the_location_that_was_saved_to(tmp_path: Path) -> None:
    called = threading.Event()

    def callback() -> None:
        wait_for_saves_to(response.checkpoint)
        called.set()

    response = hpdcp.async_save(state(), checkpoint_id=tmp_path, callback=callback)
    assert called.wait(SOON)


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
