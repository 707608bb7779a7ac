"""Four ranks load what torch.distributed.checkpoint saved: every layout, each rank its rows, errors on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint import FileSystemWriter

import hpdcp
from hpdcp._base import config
from hpdcp._base.errors import CorruptCheckpointError, IncompleteCheckpointError, MissingKeysError
from tests.support.backends import Traffic, registered
from tests.support.job import Job
from tests.support.layouts import (
    CUBE_SHARDED,
    DP2_TP2_COLUMNS,
    FSDP4,
    FSDP_TP,
    HSDP,
    LAYOUTS,
    REPLICATED,
    TP4_COLUMNS,
    Layout,
    differing,
    local_of,
    sample_tensors,
)

RANKS = 4

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")

SAVED = (FSDP4, DP2_TP2_COLUMNS, FSDP_TP, CUBE_SHARDED, REPLICATED)
"""Layouts that torch saves rightly, without those of which its own planner is wrong."""


@pytest.fixture(scope="module", autouse=True)
def _stores() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """What this rank reads, from a store that is far away."""
    with registered() as counted, config.using(backend="counting"):
        counted.reads.clear()
        yield counted


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("saved", SAVED, ids=str)
def test_what_torch_saved_in_one_layout_loads_in_every_other(ranks: Job, folder: Path, saved: Layout) -> None:
    tensors = sample_tensors()
    dcp.save(saved.place_all(ranks, tensors), checkpoint_id=folder)
    ranks.barrier()
    for layout in LAYOUTS:
        targets = layout.blank_all(ranks, tensors)
        hpdcp.load(targets, checkpoint_id=folder)
        assert differing(layout.place_all(ranks, tensors), targets) == [], layout


@pytest.mark.parametrize("broadcast", [None, True, False])
def test_what_all_ranks_want_is_broadcast(ranks: Job, folder: Path, traffic: Traffic, broadcast: bool | None) -> None:
    tensors = {f"layers.{n}.w": random(64, 256, seed=n) for n in range(8)}
    dcp.save(FSDP4.place_all(ranks, tensors), checkpoint_id=folder)
    ranks.barrier()
    for layout in (REPLICATED, HSDP):
        targets = layout.blank_all(ranks, tensors)
        traffic.reads.clear()
        hpdcp.load(targets, checkpoint_id=folder, broadcast_replicated_tensors=broadcast)
        assert differing(layout.place_all(ranks, tensors), targets) == []
        whole = sum(tensor.nbytes for tensor in tensors.values())
        copies = 1 if broadcast is not False else 4 if layout is REPLICATED else 2
        assert whole * copies <= sum(ranks.gather(traffic.nbytes)) < whole * copies * 1.6


@pytest.mark.parametrize("layout", [FSDP4, TP4_COLUMNS], ids=str)
def test_each_rank_reads_only_its_part(ranks: Job, folder: Path, traffic: Traffic, layout: Layout) -> None:
    tensors = {f"layers.{n}.w": random(8, 4 << 15, seed=n) for n in range(4)}
    dcp.save(tensors, checkpoint_id=folder)
    ranks.barrier()
    targets = layout.blank_all(ranks, tensors)
    traffic.reads.clear()
    hpdcp.load(targets, checkpoint_id=folder)
    assert differing(layout.place_all(ranks, tensors), targets) == []
    wanted = sum(local_of(target).nbytes for target in targets.values())
    assert wanted <= traffic.nbytes <= 1.05 * wanted


def test_ranks_that_saved_each_for_itself(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    saved: dict[str, Any] = {**FSDP4.place_all(ranks, tensors), "step": 5, "mine": f"rank {ranks.rank}"}
    dcp.save(saved, storage_writer=FileSystemWriter(folder), use_collectives=False)
    ranks.barrier()
    assert sorted(path.name for path in folder.glob("*.metadata")) == [f"__{rank}.metadata" for rank in range(4)]
    targets: dict[str, Any] = {**FSDP4.blank_all(ranks, tensors), "step": None, "mine": None}
    hpdcp.load(targets, checkpoint_id=folder)
    assert targets.pop("step") == 5 and targets.pop("mine") == f"rank {ranks.rank}"
    assert differing(FSDP4.place_all(ranks, tensors), targets) == []
    others = TP4_COLUMNS.blank_all(ranks, tensors)
    hpdcp.load(others, checkpoint_id=folder)
    assert differing(TP4_COLUMNS.place_all(ranks, tensors), others) == []
    if ranks.rank == 0:
        (folder / "__2.metadata").unlink()
    ranks.barrier()
    (error, *rest) = ranks.errors(lambda: hpdcp.load(others, checkpoint_id=folder))
    assert isinstance(error, IncompleteCheckpointError) and "none of rank 2" in str(error)
    assert [str(each) for each in rest] == [str(error)] * 3


def test_keys_of_fsdp1(ranks: Job, folder: Path) -> None:
    whole = random(8, 6)
    shard = sharded_tensor.Shard.from_tensor_and_offsets(
        whole[2 * ranks.rank : 2 * ranks.rank + 2].clone(), [2 * ranks.rank, 0], ranks.rank
    )
    dcp.save({"model": {"w": sharded_tensor.init_from_local_shards([shard], 8, 6)}}, checkpoint_id=folder)
    ranks.barrier()
    for layout in (REPLICATED, TP4_COLUMNS):
        targets = layout.blank_all(ranks, {"w": whole})
        hpdcp.load({"model": targets}, checkpoint_id=folder)
        assert differing(layout.place_all(ranks, {"w": whole}), targets) == []


def test_what_is_wrong_is_said_by_every_rank_and_touches_nothing(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    dcp.save(FSDP4.place_all(ranks, tensors), checkpoint_id=folder)
    ranks.barrier()
    targets = FSDP4.blank_all(ranks, tensors)
    untouched = {key: local_of(target).clone() for key, target in targets.items()}
    errors = ranks.errors(lambda: hpdcp.load({"net": targets}, checkpoint_id=folder))
    assert {type(error) for error in errors} == {MissingKeysError}
    assert all("stored without 'net.' in front" in str(error) for error in errors)
    if ranks.rank == 0:
        data = folder / "__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])
    ranks.barrier()
    errors = ranks.errors(lambda: hpdcp.load(targets, checkpoint_id=folder))
    assert {type(error) for error in errors} == {CorruptCheckpointError}
    assert all("__1_0.distcp" in str(error) for error in errors)
    assert all(torch.equal(untouched[key], local_of(target)) for key, target in targets.items())
