"""What a location is used for next comes after the background save that this process has in flight there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hpdcp
from hpdcp._manage.remove import remove_checkpoint
from tests.support.small_saves import SOON, check, state, stopped_worker


@pytest.fixture
def slow_save(tmp_path: Path) -> Iterator[hpdcp.AsyncSaveResponse]:
    """A save to `tmp_path / "step"` whose worker goes on a while after the call."""
    worker = stopped_worker()
    response = hpdcp.async_save(state(1.0), checkpoint_id=tmp_path / "step")
    timer = threading.Timer(1.0, os.kill, (worker, signal.SIGCONT))
    timer.start()
    yield response
    timer.join()
    response.get_result(SOON)


def test_a_save_is_not_overwritten_by_one_called_before_it(slow_save: hpdcp.AsyncSaveResponse, tmp_path: Path) -> None:
    hpdcp.save(state(2.0), checkpoint_id=tmp_path / "step")
    assert slow_save.done()
    check(tmp_path / "step", 2.0)


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: check(folder, 1.0),
        lambda folder: hpdcp.save(state(2.0), checkpoint_id=f"file://{folder}/"),
        remove_checkpoint,
    ],
    ids=["load", "save under another spelling", "rm"],
)
def test_every_use_waits(slow_save: hpdcp.AsyncSaveResponse, tmp_path: Path, use: Callable[[Path], object]) -> None:
    use(tmp_path / "step")
    assert slow_save.done()


def test_other_locations_do_not_wait(slow_save: hpdcp.AsyncSaveResponse, tmp_path: Path) -> None:
    hpdcp.save(state(2.0), checkpoint_id=tmp_path / "other")
    assert not slow_save.done()
