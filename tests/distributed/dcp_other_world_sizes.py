"""The two halves of one test: a job saves, and a job of another number of ranks loads what it left.

`HPDCP_TEST_FOLDER` names the folder. Run with four ranks and `-k saves`, then with any number and `-k loads`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hpdcp
from hpdcp import PerRank, RaggedShard
from hpdcp._base.errors import WorldSizeError
from hpdcp._state.ragged import from_local
from tests.support.job import Job
from tests.support.layouts import differing, local_of, sample_tensors

_SAVERS = 4


@pytest.fixture
def left() -> Path:
    return Path(os.environ["HPDCP_TEST_FOLDER"])


def _trained(job: Job, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)).to(job.device)
    for layer in model:
        fully_shard(layer, mesh=job.mesh(job.world_size))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 6, device=job.device)).sum().backward()
        optimizer.step()
    return model, optimizer


def _full_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    flat, _ = hpdcp.utils.flatten_state_dict(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    )
    return {
        name: value.full_tensor().cpu() if isinstance(value, DTensor) else value.cpu().clone()
        for name, value in flat.items()
    }


def _sharded(job: Job, dim: int) -> dict[str, torch.Tensor]:
    mesh = job.mesh(job.world_size)
    return {
        name: distribute_tensor(
            full.clone(), mesh, [Shard(dim) if full.ndim > dim else Replicate()], src_data_rank=None
        )
        for name, full in sample_tensors().items()
    }


def _ragged(job: Job) -> torch.Tensor:
    units = [2, 0, 1, 3] if job.world_size == _SAVERS else [1] + [0] * (job.world_size - 1)
    full = torch.arange(48.0)
    unit = len(full) // sum(units)
    start, stop = unit * sum(units[: job.rank]), unit * sum(units[: job.rank + 1])
    mesh = job.mesh(job.world_size)
    return from_local(full[start:stop].clone().to(job.device), mesh, [RaggedShard((0,), units)], (12, 4))


def test_a_job_saves(ranks: Job, left: Path) -> None:
    assert ranks.world_size == _SAVERS
    model, optimizer = _trained(ranks, seed=0, steps=2)
    state = {
        "model": model,
        "optimizer": optimizer,
        "data": PerRank({"at": ranks.rank, "t": torch.full((2,), 1.0 * ranks.rank)}),
    }
    hpdcp.save({**state, "even": _sharded(ranks, 0), "ragged": _ragged(ranks)}, checkpoint_id=left / "together")
    hpdcp.save({"even": _sharded(ranks, 0)}, checkpoint_id=left / "apart", use_collectives=False)
    full = _full_tensors(model, optimizer)
    if ranks.rank == 0:
        torch.save(full, left / "expected.pt")


def test_another_job_loads(ranks: Job, left: Path) -> None:
    assert ranks.world_size != _SAVERS
    model, optimizer = _trained(ranks, seed=1, steps=1)
    ragged = _ragged(ranks)
    expected_ragged = local_of(ragged).clone()
    local_of(ragged).fill_(ranks.sentinel())
    columns = _sharded(ranks, 1)
    for tensor in columns.values():
        local_of(tensor).fill_(ranks.sentinel())
    target = {"model": model, "optimizer": optimizer, "even": columns, "ragged": ragged}
    hpdcp.load(target, checkpoint_id=left / "together")
    wanted: dict[str, torch.Tensor] = torch.load(left / "expected.pt")
    found = _full_tensors(model, optimizer)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    assert differing(_sharded(ranks, 1), columns) == []
    assert torch.equal(local_of(ragged), expected_ragged)


def test_another_job_loads_state_of_each_rank_only_as_a_list(ranks: Job, left: Path) -> None:
    own: dict[str, Any] = {"data": PerRank({"at": None, "t": torch.zeros(2)})}
    with pytest.raises(WorldSizeError, match=rf"stored by 4 ranks, wanted by {ranks.world_size}.*PerRank\.all"):
        hpdcp.load(own, checkpoint_id=left / "together")
    everyone = {"data": PerRank.all()}
    hpdcp.load(everyone, checkpoint_id=left / "together")
    assert [(value["at"], value["t"].tolist()) for value in everyone["data"].value] == [(n, [n, n]) for n in range(4)]


@pytest.mark.parametrize("use_collectives", [True, False])
def test_another_job_loads_what_each_rank_saved_for_itself(ranks: Job, left: Path, use_collectives: bool) -> None:
    columns = _sharded(ranks, 1)
    for tensor in columns.values():
        local_of(tensor).fill_(ranks.sentinel())
    hpdcp.load({"even": columns}, checkpoint_id=left / "apart", use_collectives=use_collectives)
    assert differing(_sharded(ranks, 1), columns) == []
