"""A state larger than the budget for staging is copied and written in waves, while the call waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import StandardSavePlanner
from hpdcp._background._background_saves import SAVES
from hpdcp._base import config
from hpdcp._base.errors import HpdcpError
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.save_plan import WriteItem
from tests.support.workers import kill_worker, workers_of

SOON = 60.0
MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_budget() -> Iterator[None]:
    PLANS.clear()
    with config.using(async_staging_budget=MIB):
        yield
    assert hpdcp.wait_for_saves(SOON)
    PLANS.clear()


def large_state(value: float) -> dict[str, Any]:
    """Thirteen times the budget; one tensor alone is three times it."""
    parts: dict[str, Any] = {f"layer{n}": torch.full((MIB // 16,), value + n) for n in range(40)}
    parts["embedding"] = torch.full((3 * MIB // 4,), value)
    return {"model": parts, "log": [value] * 1000, "empty": torch.empty(0), "tied": parts["layer3"]}


def check(folder: Path, value: float) -> None:
    target = large_state(-1.0)
    target["log"] = None
    hpdcp.load(target, checkpoint_id=folder)
    expected = large_state(value)
    wrong = [name for name, tensor in expected["model"].items() if not torch.equal(target["model"][name], tensor)]
    assert wrong == []
    assert target["log"] == expected["log"]


def spoil(state: dict[str, Any]) -> None:
    for tensor in state["model"].values():
        tensor.fill_(-5)
    state["log"].clear()


def test_the_state_of_the_call_is_saved_and_staging_keeps_to_its_budget(tmp_path: Path) -> None:
    hpdcp.start_async_worker()
    kill_worker()  # what earlier tests staged belongs to that one
    for turn in (1.0, 2.0, 3.0):
        state = large_state(turn)
        response = hpdcp.async_save(state, checkpoint_id=tmp_path)
        spoil(state)
        response.get_result(SOON)
        check(tmp_path, turn)
    worker = SAVES._worker
    assert worker is not None
    # The largest tensor, and what is laid out in units of two MiB.
    assert worker.arena.capacity <= 6 * MIB
    assert len(PLANS) == 1


def test_saves_within_and_beyond_the_budget_reuse_each_others_plans(tmp_path: Path) -> None:
    for turn, budget in enumerate((100 * MIB, MIB, 100 * MIB, 1), start=1):
        state = large_state(float(turn))
        with config.using(async_staging_budget=budget):
            response = hpdcp.async_save(state, checkpoint_id=tmp_path)
        spoil(state)
        response.get_result(SOON)
        check(tmp_path, float(turn))
    hpdcp.save(large_state(9.0), checkpoint_id=tmp_path)
    check(tmp_path, 9.0)
    assert len(PLANS) == 1


def test_what_is_recorded_is_that_of_a_save_in_one_piece(tmp_path: Path) -> None:
    pieces = hpdcp.async_save(large_state(1.0), checkpoint_id=tmp_path / "a").get_result(SOON)
    whole = hpdcp.save(large_state(1.0), checkpoint_id=tmp_path / "b")
    assert dict(pieces.state_dict_metadata) == dict(whole.state_dict_metadata)


class Breaking(StandardSavePlanner):
    """Its state cannot be read any more after so many tensors."""

    left = 20

    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the device fell off the bus")
        return super().get_tensor(item)


def test_a_failure_between_waves_raises_in_the_call_and_publishes_nothing(tmp_path: Path) -> None:
    hpdcp.save(large_state(1.0), checkpoint_id=tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises((RuntimeError, HpdcpError), match="fell off the bus"):
        hpdcp.async_save(large_state(2.0), checkpoint_id=tmp_path, planner=Breaking())
    assert hpdcp.wait_for_saves(SOON)
    check(tmp_path, 1.0)
    assert {path.name for path in tmp_path.iterdir()} <= before | {".attempt"}
    hpdcp.async_save(large_state(3.0), checkpoint_id=tmp_path).get_result(SOON)
    check(tmp_path, 3.0)


def test_a_worker_killed_between_waves_raises_soon_and_publishes_nothing(tmp_path: Path) -> None:
    class Killing(StandardSavePlanner):
        left = 20

        def get_tensor(self, item: WriteItem) -> torch.Tensor:
            self.left -= 1
            if self.left == 0:
                workers_of()[0].kill()
            return super().get_tensor(item)

    hpdcp.save(large_state(1.0), checkpoint_id=tmp_path)
    # Whether the call itself hears of it depends on whether it had to wait for the worker again.
    with pytest.raises(HpdcpError, match="signal 9"):
        hpdcp.async_save(large_state(2.0), checkpoint_id=tmp_path, planner=Killing()).get_result(SOON)
    assert hpdcp.wait_for_saves(SOON)
    check(tmp_path, 1.0)
    hpdcp.async_save(large_state(3.0), checkpoint_id=tmp_path).get_result(SOON)
    check(tmp_path, 3.0)


def test_an_unwritable_target_raises_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HpdcpError, match="file"):
        hpdcp.async_save(large_state(1.0), checkpoint_id=tmp_path / "file" / "ckpt").get_result(SOON)
    assert hpdcp.wait_for_saves(SOON)
    hpdcp.async_save(large_state(2.0), checkpoint_id=tmp_path / "ckpt").get_result(SOON)
