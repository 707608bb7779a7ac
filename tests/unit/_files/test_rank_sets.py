"""What ranks saved each for itself loads as one save, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hpdcp
from hpdcp._base.errors import IncompleteCheckpointError, SupersededError
from hpdcp._format.file_names import rank_lease_key
from hpdcp._plan.save_plan import SavePlan
from tests.support.runs import begin_run


def save_by(ranks: Iterable[int], folder: Path, value: float, store: dist.Store) -> None:
    """Ranks of two that save each for itself, in a process that has just been started."""
    for rank in ranks:
        begin_run()
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        try:
            state = {f"of rank {rank}": torch.full((2,), value)}
            hpdcp.save(state, checkpoint_id=folder, use_collectives=False)
        finally:
            dist.destroy_process_group()


def test_a_run_that_was_started_again_and_killed_leaves_no_mixture_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run, ordinal and world size are all the same."""
    monkeypatch.setenv("HPDCP_RUN_ID", "named")
    target = {f"of rank {rank}": torch.zeros(2) for rank in range(2)}
    save_by((0, 1), tmp_path, 1.0, dist.HashStore())
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert [tensor.tolist() for tensor in target.values()] == [[1.0, 1.0]] * 2
    started_again = dist.HashStore()
    save_by((0,), tmp_path, 2.0, started_again)
    with pytest.raises(IncompleteCheckpointError, match="not one whole save"):
        hpdcp.load(target, checkpoint_id=tmp_path)
    save_by((1,), tmp_path, 2.0, started_again)
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert [tensor.tolist() for tensor in target.values()] == [[2.0, 2.0]] * 2
    assert len(list(tmp_path.iterdir())) == 4


def test_of_two_processes_that_save_alone_the_newer_one_stays(tmp_path: Path) -> None:
    class Interrupted(hpdcp.StandardSavePlanner):
        def finalize_plan(self, plan: SavePlan) -> SavePlan:
            hpdcp.save({"w": torch.full((2,), 2.0)}, checkpoint_id=tmp_path, no_dist=True)
            return super().finalize_plan(plan)

    with pytest.raises(SupersededError):
        hpdcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=Interrupted(), no_dist=True)
    target = {"w": torch.zeros(2)}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [2.0, 2.0]
    assert (tmp_path / rank_lease_key(0)).exists(), "the older one was still at work"
    hpdcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert len(list(tmp_path.iterdir())) == 2
