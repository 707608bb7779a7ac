"""Whatever a plan depends on is in the key of the cache, so that no save is written by the plan of another."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp import StandardSavePlanner
from hpdcp._base import config
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.plan_key import plan_key
from hpdcp._plan.planner import PlannerContext
from tests.support.plan_variants import VARIANTS, Backwards, LowestRank, Spread, save_as, walk_all_pairs


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    PLANS.clear()
    yield
    PLANS.clear()


def test_every_way_of_saving_after_every_other_is_as_if_it_were_the_first(tmp_path: Path) -> None:
    state = {"w": torch.arange(600.0).reshape(20, 30), "b": {"c": torch.ones(7)}, "n": [1, "x"]}
    fresh = {}
    for name in VARIANTS:
        PLANS.clear()
        fresh[name] = save_as(name, state, tmp_path / "fresh" / name)
    PLANS.clear()
    for turn, name in enumerate(walk_all_pairs(list(VARIANTS))):
        assert save_as(name, state, tmp_path / str(turn)) == fresh[name], name
        target = {"w": torch.zeros(20, 30)}
        hpdcp.load(target, checkpoint_id=tmp_path / str(turn))
        assert torch.equal(target["w"], state["w"])


def key_of(planner: StandardSavePlanner, context: PlannerContext, writer: hpdcp.FileSystemWriter) -> Hashable | None:
    planner.configure_planner({"w": torch.ones(3)}, context)
    return plan_key(writer, planner, context, config.current())


def test_a_class_that_does_not_say_what_its_plans_depend_on_has_no_key(tmp_path: Path) -> None:
    together, writer = PlannerContext(0, 2, True, True), hpdcp.FileSystemWriter(tmp_path)
    assert key_of(StandardSavePlanner(), together, writer) is not None
    assert key_of(StandardSavePlanner(), together, Backwards(tmp_path)) is None
    assert key_of(LowestRank(), together, writer) is not None
    assert key_of(Spread(), together, writer) is None
    assert key_of(StandardSavePlanner(), PlannerContext(0, 2, True, False), writer) is None


def test_every_part_of_the_context_and_every_setting_is_in_the_key(tmp_path: Path) -> None:
    writer = hpdcp.FileSystemWriter(tmp_path)
    contexts = [
        PlannerContext(0, 2, True, True),
        PlannerContext(1, 2, True, True),
        PlannerContext(0, 3, True, True),
        PlannerContext(0, 2, False, True),
    ]
    keys = [key_of(StandardSavePlanner(), context, writer) for context in contexts]
    changes = [
        {"verify": "always"},
        {"broadcast": "never"},
        {"layouts": {"zarr": {"compressor": "zstd"}}},
        {"backends": {"local": {"x": 1}}},
        {"check_replicas": "all"},
        {"check_replicas": {"*": "all"}},
    ]
    for change in changes:
        with config.using(**change):  # type: ignore[arg-type]
            keys.append(key_of(StandardSavePlanner(), contexts[0], writer))
    assert len(set(keys)) == len(keys)
    assert key_of(StandardSavePlanner(), contexts[0], hpdcp.FileSystemWriter(tmp_path / "other")) == keys[0]
