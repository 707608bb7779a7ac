"""The demo's verdict: a claim that does not hold is found. (The demo itself runs by `make demo`.)"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.support.ranks import ROOT

Runs = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_and_resume", ROOT / "docs/tutorial/train_and_resume.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def runs(demo: ModuleType) -> Runs:
    """What three runs report when all is well."""
    losses = {str(step): 3.0 + 1 / step for step in range(1, demo.STEPS + 1)}
    digests = {"model.weight": "a1", "optimizer.state.0.exp_avg": "b2"}
    whole = {"losses": losses, "digests": digests, "bytes": 10, "save_seconds": 0.1}
    later = {step: loss for step, loss in losses.items() if int(step) > demo.SAVE_AT}
    same = {"losses": later, "digests": dict(digests), "load_seconds": 0.1}
    other = copy.deepcopy(same)
    other["losses"][str(demo.STEPS)] *= 1 + 1e-6
    return whole, same, other


def a_step_less(run: dict[str, Any]) -> None:
    run["losses"].popitem()


def a_loss_a_little_off(run: dict[str, Any]) -> None:
    step, loss = run["losses"].popitem()
    run["losses"][step] = loss * (1 + 1e-7)


def a_loss_off(run: dict[str, Any]) -> None:
    step, loss = run["losses"].popitem()
    run["losses"][step] = loss * 1.001


def no_number(run: dict[str, Any]) -> None:
    run["losses"] = dict.fromkeys(run["losses"], float("nan"))


def another_tensor(run: dict[str, Any]) -> None:
    run["digests"]["model.weight"] = "c3"


def a_tensor_less(run: dict[str, Any]) -> None:
    del run["digests"]["model.weight"]


def test_all_is_well_when_every_claim_holds(demo: ModuleType, runs: Runs) -> None:
    assert demo.compare(*runs) == []


@pytest.mark.parametrize(
    ("which", "harm"),
    [
        (1, a_loss_a_little_off), (1, another_tensor), (1, a_tensor_less), (1, no_number), (1, a_step_less),
        (2, a_loss_off), (2, another_tensor), (2, a_tensor_less), (2, no_number), (2, a_step_less),
    ],
)  # fmt: skip
def test_a_claim_that_does_not_hold_is_named(
    which: int, harm: Callable[[dict[str, Any]], None], demo: ModuleType, runs: Runs
) -> None:
    harm(runs[which])
    assert demo.compare(*runs) != []
