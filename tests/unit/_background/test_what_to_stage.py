"""Of what a rank holds, only what it writes or compares is staged where a plan is cached."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpdcp import StandardSavePlanner
from hpdcp._background._what_to_stage import rows_needed
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.save_plan import SavePlan


def local_plan(state: dict[str, object]) -> SavePlan:
    planner = StandardSavePlanner()
    planner.configure_planner(state, PlannerContext(0, 1, True, True))
    return planner.build_local_plan()


@pytest.mark.parametrize(
    ("compared", "names"),
    [([], ["n"]), (["small"], ["n", "small"]), (["big", "small"], ["big", "n", "small"])],
)
def test_what_is_staged_by_a_plan_is_what_it_writes_and_what_is_compared(compared: list[str], names: list[str]) -> None:
    local = local_plan({"big": torch.zeros(1000), "small": torch.zeros(2), "n": [1]}).without_object_lengths()
    mask = np.array([item.index.fqn in compared for item in local.items])
    assert sorted(local.item(row).index.fqn for row in rows_needed(local, [], mask).tolist()) == names
    written = local.select(np.array([local.entries.fqns.find("big")]))
    with_big = [local.item(row).index.fqn for row in rows_needed(local, [written], mask).tolist()]
    assert sorted(with_big) == sorted({*names, "big"})
