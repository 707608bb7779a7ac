"""What ranks left out of their plans because earlier plans have others write it must be written by somebody."""

from __future__ import annotations

import pytest
import torch

from hpdcp import Metadata, StandardSavePlanner
from hpdcp._base.errors import StateDictError
from hpdcp._plan import replicas
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.replica_checks import check_left_out
from hpdcp._plan.save_plan import SavePlan


def plan_of(state: dict[str, object]) -> tuple[SavePlan, Metadata]:
    planner = StandardSavePlanner()
    planner.configure_planner(state, PlannerContext(0, 1, True, True))
    local = planner.build_local_plan()
    return local, planner.build_global_plan([local])[1]


def test_what_others_did_not_plan_either_is_named() -> None:
    local, metadata = plan_of({"a": torch.zeros(4), "b": torch.zeros(4)})
    _, without = plan_of({"a": torch.zeros(4)})
    check_left_out(metadata, [None, local])
    with pytest.raises(StateDictError, match=r"'b' \(rank 1\)") as caught:
        check_left_out(without, [None, local])
    assert "'a'" not in str(caught.value)


def test_what_is_written_in_parts_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SPLIT_BYTES", 64)
    planner = StandardSavePlanner()
    planner.configure_planner({"a": torch.zeros(100)}, PlannerContext(0, 2, True, True))
    local = planner.build_local_plan()
    _, metadata = planner.build_global_plan([local, local])
    assert len(metadata.chunks) == 2
    check_left_out(metadata, [local, local])
