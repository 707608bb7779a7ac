"""Eight ranks, pp=2 x dp=2 x tp=2: stages that hold different parts of a model, loaded with and without broadcasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import hpdcp
from hpdcp._base import config
from hpdcp._plan.load_plan import LoadPlan
from tests.support.backends import Traffic, registered
from tests.support.job import Job
from tests.support.layouts import differing, local_of

RANKS = 8

_BATCHES: Final = [0, 300, 6 << 20]
COLUMNS: Final = (Replicate(), Shard(0))
"""A weight whose rows are divided by tensor parallelism, the same on all data-parallel ranks."""
ROWS: Final = (Replicate(), Shard(1))
WHOLE: Final = (Replicate(), Replicate())
BOTH: Final = (Shard(0), Shard(1))
"""Divided by both, so that no two ranks hold the same."""
Spec = Mapping[str, tuple[tuple[int, ...], Sequence[Placement]]]


@pytest.fixture(autouse=True)
def traffic() -> Iterator[Traffic]:
    """What this rank reads, from a store that is far away."""
    with registered() as counted, config.using(backend="counting"):
        counted.reads.clear()
        yield counted


def _stage_of(rank: int) -> int:
    return rank // 4


@pytest.fixture
def stage_mesh(ranks: Job) -> DeviceMesh:
    """The (dp, tp) mesh of this rank's stage."""
    assert ranks.world_size == 8, "this file runs on eight ranks"
    meshes = [ranks.mesh(2, 2, ranks=range(first, first + 4)) for first in (0, 4)]
    return meshes[_stage_of(ranks.rank)]


def _full(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose values follow from its name, so that every stage knows what another one saved."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + sum(name.encode()) * 1000).reshape(shape)


def _place(mesh: DeviceMesh, spec: Spec) -> dict[str, torch.Tensor]:
    return {
        name: distribute_tensor(_full(name, shape), mesh, placements, src_data_rank=None)
        for name, (shape, placements) in spec.items()
    }


def _blank(job: Job, mesh: DeviceMesh, spec: Spec) -> dict[str, torch.Tensor]:
    placed = _place(mesh, spec)
    for tensor in placed.values():
        local_of(tensor).fill_(job.sentinel())
    return placed


def _layer(number: int) -> dict[str, tuple[tuple[int, ...], Sequence[Placement]]]:
    return {
        f"layers.{number}.attn.qkv.weight": ((12, 8), COLUMNS),
        f"layers.{number}.attn.out.weight": ((8, 4), ROWS),
        f"layers.{number}.norm.weight": ((8,), WHOLE),
    }


def _load_and_compare(
    job: Job, folder: Path, traffic: Traffic, mesh: DeviceMesh, mine: Spec, **arguments: Any
) -> list[int]:
    """Load this rank's part, see that every element is right; what each rank read, in bytes."""
    targets = _blank(job, mesh, mine)
    traffic.reads.clear()
    hpdcp.load(targets, checkpoint_id=folder, **arguments)
    assert differing(_place(mesh, mine), targets) == []
    return job.gather(traffic.nbytes)


def _nbytes(specs: Sequence[Spec]) -> int:
    """Bytes of all tensors of all stages, each once."""
    shapes = {name: shape for spec in specs for name, (shape, _) in spec.items()}
    return sum(4 * torch.Size(shape).numel() for shape in shapes.values())


@pytest.mark.parametrize("batch_bytes", _BATCHES)
def test_stages_with_keys_of_their_own(
    ranks: Job, folder: Path, traffic: Traffic, stage_mesh: DeviceMesh, batch_bytes: int
) -> None:
    specs = [
        {**_layer(0), **_layer(1), "embed.weight": ((32, 4), COLUMNS)},
        {**_layer(2), **_layer(3), "head.weight": ((32, 4), COLUMNS)},
    ]
    mine = specs[_stage_of(ranks.rank)]
    hpdcp.save(_place(stage_mesh, mine), checkpoint_id=folder)
    read = _load_and_compare(ranks, folder, traffic, stage_mesh, mine, broadcast_batch_bytes=batch_bytes)
    assert sum(read) == _nbytes(specs)
    assert sum(read[:4]) == sum(read[4:]) == _nbytes(specs[:1])
    read = _load_and_compare(ranks, folder, traffic, stage_mesh, mine, broadcast_replicated_tensors=False)
    assert sum(read) == sum(4 * local_of(t).numel() for part in [_place(stage_mesh, mine)] for t in part.values()) * 8


@pytest.mark.parametrize("batch_bytes", _BATCHES)
def test_a_stage_without_anything_replicated_goes_along(
    ranks: Job, folder: Path, traffic: Traffic, stage_mesh: DeviceMesh, batch_bytes: int
) -> None:
    specs: list[Spec] = [
        {**_layer(0), **_layer(1)},
        {"experts.0": ((16, 8), BOTH), "experts.1": ((16, 8), BOTH)},
    ]
    mine = specs[_stage_of(ranks.rank)]
    hpdcp.save(_place(stage_mesh, mine), checkpoint_id=folder)
    read = _load_and_compare(ranks, folder, traffic, stage_mesh, mine, broadcast_batch_bytes=batch_bytes)
    assert sum(read) == _nbytes(specs)
    assert len(set(read[4:])) == 1


@pytest.mark.parametrize("batch_bytes", _BATCHES)
def test_names_of_the_stages_that_interleave(
    ranks: Job, folder: Path, traffic: Traffic, stage_mesh: DeviceMesh, batch_bytes: int
) -> None:
    # Even layers on one stage, odd ones on the other: in the order of names they take turns.
    specs = [
        {name: where for number in range(first, 12, 2) for name, where in _layer(number).items()} for first in (0, 1)
    ]
    mine = specs[_stage_of(ranks.rank)]
    hpdcp.save(_place(stage_mesh, mine), checkpoint_id=folder)
    read = _load_and_compare(ranks, folder, traffic, stage_mesh, mine, broadcast_batch_bytes=batch_bytes)
    assert sum(read) == _nbytes(specs)


@pytest.mark.parametrize("batch_bytes", _BATCHES)
def test_tensors_that_stages_share_reach_ranks_that_are_not_neighbours(
    ranks: Job,
    folder: Path,
    traffic: Traffic,
    stage_mesh: DeviceMesh,
    batch_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An embedding that the first and the last stage hold, divided by tensor parallelism: groups (0,2,4,6), (1,3,5,7).
    shared = {"embed.weight": ((32, 4), COLUMNS), "final.norm": ((8,), WHOLE)}
    specs = [{**_layer(0), **shared}, {**shared, **_layer(1)}]
    mine = specs[_stage_of(ranks.rank)]
    hpdcp.save(_place(stage_mesh, mine), checkpoint_id=folder)
    made: list[tuple[int, ...]] = []
    new_group = dist.new_group

    def noted(members: list[int], **options: Any) -> Any:
        made.append(tuple(members))
        return new_group(members, **options)

    monkeypatch.setattr(dist, "new_group", noted)
    read = _load_and_compare(ranks, folder, traffic, stage_mesh, mine, broadcast_batch_bytes=batch_bytes)
    assert sum(read) == _nbytes(specs)
    within = [(0, 1, 2, 3), (0, 2), (1, 3), (4, 5, 6, 7), (4, 6), (5, 7)]
    across = [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert made == sorted(within + across)


@pytest.mark.parametrize("batch_bytes", _BATCHES)
def test_ranks_that_only_some_tensors_bring_together(
    ranks: Job, folder: Path, traffic: Traffic, stage_mesh: DeviceMesh, batch_bytes: int
) -> None:
    # Plain tensors in odd company; each rank is in several groups, and no two of these have the same ranks.
    company = {"a": (0, 1, 6, 7), "b": (0, 2), "c": (1, 2, 7), "d": (0, 7), "e": (3, 4, 6), "f": (2, 3, 5, 6, 7)}
    names = [f"{letter}.{number}" for number in range(6) for letter in company]
    everything = {name: _full(name, (5, len(name) + number)) for number, name in enumerate(names)}
    hpdcp.save(everything if ranks.rank == 0 else {}, checkpoint_id=folder)
    wanted = [name for name in names if ranks.rank in company[name[0]]]
    targets = {name: torch.full(everything[name].shape, ranks.sentinel()) for name in wanted}
    if ranks.rank % 2:
        targets = dict(reversed(targets.items()))
    hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=batch_bytes)
    assert differing({name: everything[name] for name in wanted}, targets) == []
    assert sum(ranks.gather(traffic.nbytes)) == sum(tensor.nbytes for tensor in everything.values())


@pytest.mark.parametrize("batch_bytes", _BATCHES)
def test_virtual_stages_whose_keys_come_in_another_order(
    ranks: Job, folder: Path, traffic: Traffic, stage_mesh: DeviceMesh, batch_bytes: int
) -> None:
    # Each rank holds two chunks of the model, and builds its state dict in an order of its own.
    chunks = [{0: [0, 2], 1: [1, 3]}, {0: [2, 0], 1: [3, 1]}]
    saved = [{name: where for number in chunks[0][stage] for name, where in _layer(number).items()} for stage in (0, 1)]
    mine = saved[_stage_of(ranks.rank)]
    hpdcp.save(_place(stage_mesh, mine), checkpoint_id=folder)
    order = chunks[ranks.rank % 2][_stage_of(ranks.rank)]
    turned: dict[str, Any] = {name: where for number in order for name, where in _layer(number).items()}
    if ranks.rank in (2, 5):
        turned = dict(reversed(turned.items()))
    read = _load_and_compare(ranks, folder, traffic, stage_mesh, turned, broadcast_batch_bytes=batch_bytes)
    assert sum(read) == _nbytes(saved)


def test_another_pipeline_layout_takes_over(ranks: Job, folder: Path, traffic: Traffic, stage_mesh: DeviceMesh) -> None:
    specs = [{**_layer(0), **_layer(1)}, {**_layer(2), **_layer(3)}]
    hpdcp.save(_place(stage_mesh, specs[_stage_of(ranks.rank)]), checkpoint_id=folder)
    # pp=1 x dp=4 x tp=2
    mesh = ranks.mesh(4, 2)
    read = _load_and_compare(ranks, folder, traffic, mesh, {**specs[0], **specs[1]})
    assert sum(read) == _nbytes(specs)
    # pp=4 x dp=1 x tp=2, the stages turned round
    meshes = [ranks.mesh(1, 2, ranks=(first, first + 1)) for first in (0, 2, 4, 6)]
    stage = ranks.rank // 2
    read = _load_and_compare(ranks, folder, traffic, meshes[stage], _layer(3 - stage))
    assert sum(read) == _nbytes(specs)


def test_every_rank_is_told_of_its_own_groups_only(
    ranks: Job, folder: Path, stage_mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _layer(_stage_of(ranks.rank))
    hpdcp.save(_place(stage_mesh, spec), checkpoint_id=folder)
    seen: list[list[tuple[int, ...]]] = []

    class Planner(hpdcp.StandardLoadPlanner):
        def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
            seen.append(plan.shared_columns.groups)
            return super().finalize_plan(plan)

    hpdcp.load(_blank(ranks, stage_mesh, spec), checkpoint_id=folder, planner=Planner())
    first = ranks.rank // 4 * 4
    pair = (first + ranks.rank % 2, first + ranks.rank % 2 + 2)
    assert seen == [sorted([tuple(range(first, first + 4)), pair])]
