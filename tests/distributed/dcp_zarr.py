"""The zarr layout by four ranks: whatever way a tensor lies over them, it becomes one array, and comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import hpdcp
from hpdcp import PerRank
from hpdcp._base import config
from hpdcp._base.errors import CheckpointExistsError, InvalidArgumentError, NotSupportedError, ReplicaMismatchError
from hpdcp._manage.verify import verify_checkpoint
from hpdcp._plan.plan_cache import PLANS
from hpdcp_backends._zarr import grid
from tests.support.job import Job
from tests.support.layouts import (
    CHUNKED,
    FSDP_TP,
    FSDP_TP_SAME,
    HSDP,
    LAYOUTS,
    PLAIN,
    RAGGED,
    TP4,
    TP4_COLUMNS,
    Layout,
    differing,
    sample_tensors,
)

RANKS = 4


@pytest.fixture(autouse=True)
def zarr_layout() -> Iterator[None]:
    PLANS.clear()
    with config.using(layout="zarr"):
        yield


def assert_arrays(job: Job, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """What zarr itself finds in the folder, without hpdcp, is the global tensors."""
    if job.rank == 0:
        group: Any = zarr.open_group(folder, mode="r")
        for name, full in tensors.items():
            array = group["model"][name]
            assert array.shape == tuple(full.shape)
            found = torch.from_numpy(np.asarray(array[...]))
            assert torch.equal(found, full), name
    job.barrier()


def assert_loads(job: Job, folder: Path, target: Layout, tensors: dict[str, torch.Tensor]) -> None:
    found = target.blank_all(job, tensors)
    hpdcp.load({"model": found}, checkpoint_id=folder)
    assert differing(target.place_all(job, tensors), found) == []


@pytest.mark.parametrize("least", [1, 40, grid.SMALL_BYTES])
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_what_any_layout_saves_is_one_array_each_and_loads_under_others(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, source: Layout, least: int
) -> None:
    monkeypatch.setattr(grid, "SMALL_BYTES", least)
    tensors = sample_tensors()
    hpdcp.save({"model": source.place_all(ranks, tensors)}, checkpoint_id=folder)
    assert_arrays(ranks, folder, tensors)
    others = random.Random(f"{source}{least}").sample(LAYOUTS, 2)
    for target in [source, *others]:
        assert_loads(ranks, folder, target, tensors)
    if ranks.rank == 0:
        assert verify_checkpoint(folder).is_sound
        assert not list(folder.glob("*.handed"))
    ranks.barrier()


@pytest.mark.parametrize("source", [TP4_COLUMNS, FSDP_TP_SAME, RAGGED, CHUNKED, PLAIN], ids=str)
def test_compressed_chunks_come_back_under_any_layout(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, source: Layout
) -> None:
    monkeypatch.setattr(grid, "SMALL_BYTES", 40)
    tensors = sample_tensors()
    with config.using(layouts={"zarr": {"compressor": "zstd", "level": 5}}):
        hpdcp.save({"model": source.place_all(ranks, tensors)}, checkpoint_id=folder)
    assert_arrays(ranks, folder, tensors)
    for target in (TP4, FSDP_TP, RAGGED):
        assert_loads(ranks, folder, target, tensors)


def test_no_two_ranks_write_one_chunk_and_small_tensors_are_one_each(ranks: Job, folder: Path) -> None:
    tensors = {f"w{number}": torch.full((64,), float(number)) for number in range(12)}
    hpdcp.save({"model": TP4.place_all(ranks, tensors)}, checkpoint_id=folder)
    assert_arrays(ranks, folder, tensors)
    chunks = [path for path in folder.rglob("c/*") if path.is_file()]
    assert len(chunks) == len(tensors)


def test_a_second_save_uses_the_plan_of_the_first_and_hands_over_alike(
    ranks: Job, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = sample_tensors()
    placed = {"model": FSDP_TP.place_all(ranks, tensors), "step": 1}
    hpdcp.save(placed, checkpoint_id=folder / "first")
    with caplog.at_level("INFO", logger="hpdcp"):
        hpdcp.save(placed, checkpoint_id=folder / "second")
    assert "Hit final plan and metadata cache." in caplog.text
    assert_arrays(ranks, folder / "second", tensors)
    assert_loads(ranks, folder / "second", TP4, tensors)


@pytest.mark.parametrize("use_gloo", [True, False])
@pytest.mark.parametrize("budget", [None, 96])
def test_saves_in_the_background_hand_over_too(ranks: Job, folder: Path, use_gloo: bool, budget: int | None) -> None:
    tensors = sample_tensors()
    placed = {"model": FSDP_TP.place_all(ranks, tensors), "rng": PerRank({"seed": torch.tensor([ranks.rank])})}
    with config.using(async_staging_budget=budget):
        for number in range(2):
            hpdcp.async_save(placed, checkpoint_id=folder / str(number), use_gloo=use_gloo).get_result(120)
            assert_arrays(ranks, folder / str(number), tensors)
            assert_loads(ranks, folder / str(number), RAGGED, tensors)
    target = {"rng": PerRank({"seed": torch.tensor([-1])})}
    hpdcp.load(target, checkpoint_id=folder / "1")
    assert target["rng"].value["seed"].item() == ranks.rank


def test_saving_over_one_is_refused_on_every_rank_and_changes_nothing(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    placed = {"model": HSDP.place_all(ranks, tensors)}
    hpdcp.save(placed, checkpoint_id=folder)
    before = sorted(path for path in folder.rglob("*"))
    errors = ranks.errors(lambda: hpdcp.save(placed, checkpoint_id=folder))
    assert {type(error) for error in errors} == {CheckpointExistsError}
    assert sorted(path for path in folder.rglob("*")) == before
    assert_loads(ranks, folder, TP4, tensors)


def test_without_collectives_it_is_refused_unless_one_process_saves_alone(ranks: Job, folder: Path) -> None:
    state = {"model": {"w": torch.arange(6.0)}}
    errors = ranks.errors(lambda: hpdcp.save(state, checkpoint_id=folder / "apart", use_collectives=False))
    assert {type(error) for error in errors} == {NotSupportedError}
    if ranks.rank == 0:
        hpdcp.save(state, checkpoint_id=folder / "alone", no_dist=True)
        target = {"model": {"w": torch.zeros(6)}}
        hpdcp.load(target, checkpoint_id=folder / "alone", no_dist=True)
        assert torch.equal(target["model"]["w"], torch.arange(6.0))
        with pytest.raises(CheckpointExistsError):
            hpdcp.save(state, checkpoint_id=folder / "alone", no_dist=True)
    ranks.barrier()


def test_ranks_that_name_different_layouts_are_told_so(ranks: Job, folder: Path) -> None:
    layout = "safetensors" if ranks.rank == 2 else "zarr"
    with config.using(layout=layout):
        errors = ranks.errors(lambda: hpdcp.save({"x": torch.ones(2)}, checkpoint_id=folder))
    assert {type(error) for error in errors} == {InvalidArgumentError}
    assert "layout" in str(errors[0])


@pytest.mark.parametrize("compressor", ["none", "zstd"])
def test_replicas_that_differ_are_found_whatever_form_they_are_stored_in(
    ranks: Job, folder: Path, compressor: str
) -> None:
    state = {"model": {"w": torch.full((5, 3), float(ranks.rank == 1))}}
    with config.using(layouts={"zarr": {"compressor": compressor}}):
        errors = ranks.errors(lambda: hpdcp.save(state, checkpoint_id=folder))
    assert {type(error) for error in errors} == {ReplicaMismatchError}
    if ranks.rank == 0:
        assert not list(folder.rglob("zarr.json"))
        assert not (folder / ".metadata").exists()
    ranks.barrier()
