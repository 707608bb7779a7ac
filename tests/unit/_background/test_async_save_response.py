"""How a save went: results, errors, timeouts and callbacks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import pytest

import hpdcp
from hpdcp import AsyncSaveResponse
from hpdcp._base.errors import (
    HpdcpError,
    StorageError,
    WaitTimeoutError,
    WorkerDiedError,
)
from hpdcp._plan.plan_cache import PLANS
from tests.support.small_saves import SOON, check, state, stopped_worker


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    PLANS.clear()
    yield
    assert hpdcp.wait_for_saves(SOON)


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


def test_a_callback_runs_once_and_a_done_callback_of_the_future_does_too(tmp_path: Path) -> None:
    calls: list[str] = []
    response = hpdcp.async_save(state(), checkpoint_id=tmp_path, callback=lambda: calls.append("callback"))
    response.persist_completion.add_done_callback(lambda future: calls.append("future"))
    assert isinstance(response, AsyncSaveResponse)
    assert hpdcp.wait_for_saves(SOON)
    assert sorted(calls) == ["callback", "future"]


def test_a_callback_may_save(tmp_path: Path) -> None:
    """Such as a copy to a second location, from the thread that the callback runs in."""
    done = threading.Event()

    def copy() -> None:
        hpdcp.save(state(5.0), checkpoint_id=tmp_path / "2", no_dist=True)
        done.set()

    hpdcp.async_save(state(), checkpoint_id=tmp_path / "1", callback=copy).get_result(SOON)
    assert done.wait(SOON)
    check(tmp_path / "2", 5.0)


def test_errors_of_a_worker_are_errors_of_hpdcp() -> None:
    assert issubclass(WorkerDiedError, HpdcpError)
    assert issubclass(WaitTimeoutError, TimeoutError)
