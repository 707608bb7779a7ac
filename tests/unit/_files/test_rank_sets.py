"""What ranks saved each for itself loads as one save, the new one or the one before it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hpdcp
from hpdcp._base.errors import CorruptCheckpointError, IncompleteCheckpointError, SupersededError
from hpdcp._comm.exchange import Alone
from hpdcp._engine.save import save_state
from hpdcp._format.file_names import rank_lease_key
from hpdcp._manage.inspect import inspect_checkpoint
from hpdcp._manage.remove import remove_checkpoint
from hpdcp._manage.verify import verify_checkpoint
from hpdcp._plan.save_plan import SavePlan
from tests.support.runs import begin_run


def save_by(ranks: Iterable[int], folder: Path, value: float, store: dist.Store) -> None:
    """Ranks of two that save each for itself, in a process that has just been started; no rank hears of the other."""
    for rank in ranks:
        begin_run()
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        try:
            save_state(
                {f"of rank {rank}": torch.full((2,), value)},
                open_writer=lambda: hpdcp.FileSystemWriter(folder),
                planner=hpdcp.StandardSavePlanner(),
                exchange=Alone(rank, 2),
                collective=False,
            )
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
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert [tensor.tolist() for tensor in target.values()] == [[1.0, 1.0]] * 2
    save_by((1,), tmp_path, 2.0, started_again)
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert [tensor.tolist() for tensor in target.values()] == [[2.0, 2.0]] * 2


@pytest.fixture
def half_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rank 0 has replaced what it saved, rank 1 has not."""
    monkeypatch.setenv("HPDCP_RUN_ID", "named")
    save_by((0, 1), tmp_path, 1.0, dist.HashStore())
    save_by((0,), tmp_path, 2.0, dist.HashStore())
    return tmp_path


def test_verify_and_inspect_see_the_save_before(half_replaced: Path) -> None:
    report = verify_checkpoint(half_replaced)
    assert (report.files, report.damages) == (2, ())
    assert inspect_checkpoint(half_replaced).by_rank


def test_a_removal_takes_what_is_kept_too(half_replaced: Path) -> None:
    removed = remove_checkpoint(half_replaced, force=True)
    assert removed.foreign == ()
    assert removed.metadata[0].count(".") == 2, "kept records go first: else the save before would load half-way"
    assert not half_replaced.exists() or list(half_replaced.iterdir()) == []


def test_a_lost_file_of_the_save_before_is_told_as_lost(half_replaced: Path) -> None:
    next(half_replaced.glob("_rank1_.*")).unlink()
    with pytest.raises(CorruptCheckpointError, match="lost a data file"):
        hpdcp.load({"of rank 1": torch.zeros(2)}, checkpoint_id=half_replaced)


def test_without_what_was_kept_a_mixture_is_refused(half_replaced: Path) -> None:
    next(half_replaced.glob("0.*.metadata")).unlink()
    with pytest.raises(IncompleteCheckpointError, match="not one whole save"):
        hpdcp.load({"of rank 1": torch.zeros(2)}, checkpoint_id=half_replaced)


def test_a_save_of_all_ranks_together_removes_what_is_kept(half_replaced: Path) -> None:
    metadata = hpdcp.save({"w": torch.ones(2)}, checkpoint_id=half_replaced)
    assert len(list(half_replaced.iterdir())) == 2 + len(metadata.files)


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
