"""`use_collectives=False` and `no_dist=True`: each rank publishes for itself, and a load puts the parts together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import PerRank, StandardLoadPlanner
from hpdcp._base.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    MissingKeysError,
    StateDictError,
    StorageError,
    WorldSizeError,
)
from hpdcp._plan.write_results import WriteResults
from tests.support.data_files import without_attempt
from tests.support.job import Job
from tests.support.layouts import FSDP_TP, FSDP_TP_SAME, LAYOUTS, TP2, TP4, Layout, differing, local_of, sample_tensors

RANKS = 4


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _save_apart(job: Job, folder: Path, state: dict[str, Any]) -> hpdcp.Metadata:
    metadata = hpdcp.save(state, checkpoint_id=folder, use_collectives=False)
    job.barrier()
    return metadata


def _check_load(job: Job, folder: Path, layout: Layout, **arguments: Any) -> None:
    tensors = sample_tensors()
    targets = layout.blank_all(job, tensors)
    hpdcp.load(targets, checkpoint_id=folder, **arguments)
    assert differing(layout.place_all(job, tensors), targets) == []


def test_each_rank_publishes_its_own_metadata_and_nothing_global(ranks: Job, folder: Path) -> None:
    metadata = _save_apart(ranks, folder, TP4.place_all(ranks, sample_tensors()))
    assert metadata.settings["rank"] == str(ranks.rank)
    assert metadata.world_size == 4
    assert (folder / f"{ranks.rank}.metadata").read_bytes() == metadata.to_bytes()
    names = sorted(without_attempt(path.name for path in folder.iterdir()))
    assert names == sorted(
        [f"{rank}.metadata" for rank in range(4)] + [f"_rank{rank}_.safetensors" for rank in range(4)]
    )


@pytest.mark.parametrize("use_collectives", [True, False])
def test_a_load_without_global_metadata_falls_back_to_the_ranks_own(
    ranks: Job, folder: Path, use_collectives: bool
) -> None:
    state = {**TP4.place_all(ranks, sample_tensors()), "own": PerRank(ranks.rank), "step": 5}
    _save_apart(ranks, folder, state)
    targets = {**TP4.blank_all(ranks, sample_tensors()), "own": PerRank(None), "step": 0}
    hpdcp.load(targets, checkpoint_id=folder, use_collectives=use_collectives)
    assert targets.pop("own").value == ranks.rank
    assert targets.pop("step") == 5
    assert differing(TP4.place_all(ranks, sample_tensors()), targets) == []


@pytest.mark.parametrize("again", [False, True], ids=["first", "over an old set"])
def test_a_load_right_after_a_save_finds_every_file(ranks: Job, folder: Path, again: bool) -> None:
    """Also on a rank that was done long before the others, and for what only another rank saved."""
    other = (ranks.rank + 1) % 4
    for value in range(1 + again):
        if ranks.rank == 3:
            time.sleep(0.5)
        state = {f"of rank {ranks.rank}": torch.full((2,), float(value))}
        hpdcp.save(state, checkpoint_id=folder, use_collectives=False)
        target = {f"of rank {other}": torch.full((2,), ranks.sentinel())}
        hpdcp.load(target, checkpoint_id=folder, use_collectives=False)
        assert target[f"of rank {other}"].tolist() == [value, value]


def test_a_rank_that_fails_is_heard_of_by_all_when_the_save_ends(ranks: Job, folder: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(2), "x": {1: torch.ones(1), "1": torch.ones(1)} if ranks.rank == 2 else 0}
    with pytest.raises(StateDictError, match="rank 2"):
        hpdcp.save(state, checkpoint_id=folder, use_collectives=False)


def test_no_rank_waits_for_another_in_a_load(ranks: Job, folder: Path) -> None:
    others = [f"{folder}/saved/{rank}" for rank in range(3)]
    hpdcp.save(TP4.place_all(ranks, sample_tensors()), checkpoint_id=folder, use_collectives=False)
    if ranks.rank == 3:
        ranks.store.wait([key.replace("saved", "loaded") for key in others], timedelta(seconds=30))
    _check_load(ranks, folder, TP4, use_collectives=False)
    ranks.store.set(f"{folder}/loaded/{ranks.rank}", "")


@pytest.mark.parametrize("after", LAYOUTS, ids=str)
def test_where_a_ranks_own_file_does_not_cover_what_it_wants_all_are_merged(
    ranks: Job, folder: Path, after: Layout
) -> None:
    _save_apart(ranks, folder, FSDP_TP_SAME.place_all(ranks, sample_tensors()))
    _check_load(ranks, folder, after)


def test_a_partial_load_takes_from_all_ranks_files_what_is_not_in_its_own(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    _save_apart(ranks, folder, TP4.place_all(ranks, tensors))
    targets: dict[str, Any] = FSDP_TP.blank_all(ranks, tensors)
    planner = StandardLoadPlanner(allow_partial_load=True)
    hpdcp.load({**targets, "new": 1}, checkpoint_id=folder, planner=planner)
    assert planner.not_loaded == ("new",)
    assert differing(FSDP_TP.place_all(ranks, tensors), targets) == []


def test_a_key_that_only_another_rank_saved_is_found(ranks: Job, folder: Path) -> None:
    _save_apart(ranks, folder, {f"of rank {ranks.rank}": torch.full((2,), float(ranks.rank))})
    other = (ranks.rank + 1) % 4
    target = {f"of rank {other}": torch.full((2,), ranks.sentinel())}
    hpdcp.load(target, checkpoint_id=folder)
    assert target[f"of rank {other}"].tolist() == [other, other]
    with pytest.raises(MissingKeysError, match="of rank 9"):
        hpdcp.load({"of rank 9": 0}, checkpoint_id=folder)


def test_one_process_alone_loads_what_four_ranks_saved_apart(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    _save_apart(ranks, folder, {**TP4.place_all(ranks, tensors), "own": PerRank(ranks.rank)})
    targets = {name: torch.full_like(full, ranks.sentinel()) for name, full in tensors.items()}
    hpdcp.load(targets, checkpoint_id=folder, no_dist=True)
    assert differing(tensors, targets) == []
    with pytest.raises(WorldSizeError, match=r"PerRank\.all"):
        hpdcp.load({"own": PerRank(None)}, checkpoint_id=folder, no_dist=True)
    everyone = {"own": PerRank.all()}
    hpdcp.load(everyone, checkpoint_id=folder, no_dist=True)
    assert everyone["own"].value == [0, 1, 2, 3]


def test_four_ranks_load_what_one_process_saved_alone(ranks: Job, folder: Path) -> None:
    if ranks.rank == 3:
        metadata = hpdcp.save(sample_tensors(), checkpoint_id=folder, no_dist=True)
        assert metadata.world_size == 1
        assert sorted(without_attempt(path.name for path in folder.iterdir())) == ["0.metadata", "_rank0_.safetensors"]
    ranks.barrier()
    _check_load(ranks, folder, FSDP_TP)
    _check_load(ranks, folder, TP2, use_collectives=False)


def test_the_same_run_may_overwrite_its_own_and_leaves_no_old_files(ranks: Job, folder: Path) -> None:
    for step in range(3):
        state = {"w": TP4.place(ranks, torch.full((8, 2), float(step))), "step": step}
        metadata = _save_apart(ranks, folder, state)
        listed = set().union(*ranks.gather(set(metadata.files)))
        found = {path.name for path in folder.iterdir()}
        assert found == listed | {f"{rank}.metadata" for rank in range(4)}
        ranks.barrier()
    targets = {"w": FSDP_TP.blank_all(ranks, {"w": torch.zeros(8, 2)})["w"], "step": -1}
    hpdcp.load(targets, checkpoint_id=folder)
    assert bool((local_of(targets["w"]) == 2).all())
    assert targets["step"] == 2


def test_a_folder_of_another_run_is_refused_and_not_changed(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = TP4.place_all(ranks, sample_tensors())
    monkeypatch.setenv("HPDCP_RUN_ID", "the first run")
    _save_apart(ranks, folder, state)
    before = _contents(folder)
    monkeypatch.setenv("HPDCP_RUN_ID", "a second run")
    with pytest.raises(CheckpointExistsError, match="HPDCP_RUN_ID"):
        hpdcp.save(state, checkpoint_id=folder, use_collectives=False)
    ranks.barrier()
    assert _contents(folder) == before
    ranks.barrier()
    monkeypatch.setenv("HPDCP_RUN_ID", "the first run")
    _save_apart(ranks, folder, state)


def test_a_checkpoint_that_all_ranks_saved_together_is_refused_and_not_changed(ranks: Job, folder: Path) -> None:
    state = TP4.place_all(ranks, sample_tensors())
    hpdcp.save(state, checkpoint_id=folder)
    before = _contents(folder)
    with pytest.raises(CheckpointExistsError, match="all ranks saved together"):
        hpdcp.save(state, checkpoint_id=folder, use_collectives=False)
    with pytest.raises(CheckpointExistsError, match="all ranks saved together"):
        hpdcp.save(sample_tensors(), checkpoint_id=folder, no_dist=True)
    ranks.barrier()
    assert _contents(folder) == before


def test_a_set_of_another_world_size_is_refused_and_not_changed(ranks: Job, folder: Path) -> None:
    _save_apart(ranks, folder, TP4.place_all(ranks, sample_tensors()))
    before = _contents(folder)
    with pytest.raises(CheckpointExistsError, match=r"0\.metadata"):
        hpdcp.save(sample_tensors(), checkpoint_id=folder, no_dist=True)
    ranks.barrier()
    assert _contents(folder) == before


def test_a_set_that_a_later_save_replaced_on_some_ranks_still_loads_on_all(ranks: Job, folder: Path) -> None:
    """Where all ranks can know that they take the same one: else a rank may be past the wait for the later save."""
    state = TP4.place_all(ranks, sample_tensors())
    hpdcp.save({**state, "step": 1}, checkpoint_id=folder, use_collectives=False)

    class Full(hpdcp.FileSystemWriter):
        def finalize_checkpoint(self, metadata: hpdcp.Metadata, results: Sequence[WriteResults]) -> hpdcp.Metadata:
            raise StorageError("the disk is full")

    writer = (Full if ranks.rank == 1 else hpdcp.FileSystemWriter)(folder)
    with pytest.raises(StorageError, match="the disk is full"):
        hpdcp.save({**state, "step": 2}, storage_writer=writer, use_collectives=False)
    ranks.barrier()
    targets = {**TP4.blank_all(ranks, sample_tensors()), "step": 0}
    with pytest.raises(IncompleteCheckpointError, match=r"not one whole save.*use_collectives=True"):
        hpdcp.load(targets, checkpoint_id=folder, use_collectives=False)
    assert targets.pop("step") == 0
    assert all(bool((local_of(tensor) == ranks.sentinel()).all()) for tensor in targets.values())
    targets["step"] = 0
    hpdcp.load(targets, checkpoint_id=folder)
    assert targets.pop("step") == 1
    assert differing(state, targets) == []
    alone = {"step": 0}
    hpdcp.load(alone, checkpoint_id=folder, no_dist=True)
    assert alone == {"step": 1}
    ranks.barrier()
    hpdcp.save({**state, "step": 3}, checkpoint_id=folder, use_collectives=False)
    ranks.barrier()
    hpdcp.load(alone, checkpoint_id=folder, no_dist=True)
    assert alone == {"step": 3}
    assert len(list(folder.iterdir())) == 4 + len([path for path in folder.iterdir() if path.name.startswith("_rank")])
    assert not [path for path in folder.iterdir() if path.name.count(".") == 2 and path.name.endswith(".metadata")]


def test_a_set_that_lacks_a_rank_is_refused_on_all_ranks(ranks: Job, folder: Path) -> None:
    _save_apart(ranks, folder, TP4.place_all(ranks, sample_tensors()))
    if ranks.rank == 0:
        (folder / "2.metadata").unlink()
    ranks.barrier()
    with pytest.raises(IncompleteCheckpointError, match="not one whole save"):
        hpdcp.load(TP4.blank_all(ranks, sample_tensors()), checkpoint_id=folder)


def test_a_save_of_all_ranks_replaces_a_set_that_each_saved_for_itself(ranks: Job, folder: Path) -> None:
    _save_apart(ranks, folder, {"step": 1, "gone": TP4.place(ranks, torch.zeros(8))})
    metadata = hpdcp.save({"step": 2}, checkpoint_id=folder)
    target = {"step": 0}
    hpdcp.load(target, checkpoint_id=folder)
    assert target["step"] == 2
    ranks.barrier()
    assert {path.name for path in folder.iterdir()} == {".metadata", ".attempt", *metadata.files}


def test_no_checkpoint_at_all_is_said_so_on_all_ranks(ranks: Job, folder: Path) -> None:
    for place in (folder, folder / "not there"):
        with pytest.raises(CheckpointNotFoundError, match=str(place)):
            hpdcp.load({"a": 1}, checkpoint_id=place)


@pytest.mark.parametrize("broadcast", [{"broadcast_replicated_tensors": True}, {"broadcast_groups": {}}])
@pytest.mark.parametrize("alone", [{"use_collectives": False}, {"no_dist": True}])
def test_broadcasting_needs_all_ranks(
    ranks: Job, folder: Path, broadcast: dict[str, Any], alone: dict[str, bool]
) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(alone))):
        hpdcp.load({"a": 1}, checkpoint_id=folder, **broadcast, **alone)
