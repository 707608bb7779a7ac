"""FSDP2 over tensor parallelism, with optimizer state: trained, saved, and taken up again under other layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import hpdcp
from hpdcp import PerRank
from hpdcp.utils import flatten_state_dict, unflatten_state_dict
from tests.support.job import Job
from tests.support.layouts import local_of

RANKS = 4

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    """A size that four ranks do not divide evenly, and a buffer that all of them hold."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6, bias=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _model(job: Job, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block()).to(job.device)


def _tensor_parallel(model: nn.Sequential, mesh: Any) -> None:
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fully_sharded(model: nn.Sequential, mesh: Any) -> None:
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _plain(job: Job, model: nn.Sequential) -> None:
    """Every rank holds everything."""


def _fsdp(job: Job, model: nn.Sequential) -> None:
    _fully_sharded(model, job.mesh(4))


def _hsdp(job: Job, model: nn.Sequential) -> None:
    _fully_sharded(model, job.mesh(2, 2))


def _tp(job: Job, model: nn.Sequential) -> None:
    _tensor_parallel(model, job.mesh(1, 4)["axis1"])


def _fsdp_tp(job: Job, model: nn.Sequential) -> None:
    mesh = job.mesh(2, 2)
    _tensor_parallel(model, mesh["axis1"])
    _fully_sharded(model, mesh["axis0"])


_WAYS = {"plain": _plain, "FSDP": _fsdp, "HSDP": _hsdp, "TP": _tp, "FSDP x TP": _fsdp_tp}


def _start(job: Job, way: str, seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = _model(job, seed)
    _WAYS[way](job, model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def _train(job: Job, model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(100)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 6, device=job.device)).pow(2).sum().backward()
        optimizer.step()


def _state(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT),
    }


def _full(tensors: dict[str, Any]) -> dict[str, Any]:
    """Every tensor gathered by torch; values that are none stay."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone() if torch.is_tensor(value) else value
        for name, value in tensors.items()
    }


def _unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    def same(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if torch.is_tensor(x) else bool(x == y)

    return [name for name in a.keys() | b.keys() if name not in a or name not in b or not same(a[name], b[name])]


@pytest.mark.parametrize("before", ["FSDP x TP", "FSDP", "TP"])
def test_model_and_optimizer_resume_under_every_other_layout(ranks: Job, folder: Path, before: str) -> None:
    model, optimizer = _start(ranks, before, seed=0)
    _train(ranks, model, optimizer, 2)
    state = _state(model, optimizer)
    random = torch.get_rng_state()
    hpdcp.save({**state, "step": 2, "rng": PerRank(random)}, checkpoint_id=folder)
    wanted = _full(state["model"]), _full(state["optimizer"])
    for after in _WAYS:
        other, other_optimizer = _start(ranks, after, seed=1)
        _train(ranks, other, other_optimizer, 1)
        target = {**_state(other, other_optimizer), "step": 0, "rng": PerRank(torch.zeros_like(random))}
        for value in (*target["model"].values(), *target["optimizer"].values()):
            if torch.is_tensor(value):
                local_of(value).fill_(ranks.sentinel())
        hpdcp.load(target, checkpoint_id=folder)
        assert target["step"] == 2
        assert torch.equal(target["rng"].value, random)
        set_model_state_dict(other, target["model"])
        set_optimizer_state_dict(other, other_optimizer, target["optimizer"], options=_FLAT)
        resumed = _state(other, other_optimizer)
        assert _unequal(wanted[0], _full(resumed["model"])) == [], (before, after)
        assert _unequal(wanted[1], _full(resumed["optimizer"])) == [], (before, after)


def test_a_run_that_resumes_goes_on_bit_for_bit_as_one_that_never_stopped(ranks: Job, folder: Path) -> None:
    model, optimizer = _start(ranks, "FSDP x TP", seed=0)
    _train(ranks, model, optimizer, 2)
    hpdcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    _train(ranks, model, optimizer, 2)
    other, other_optimizer = _start(ranks, "FSDP x TP", seed=1)
    _train(ranks, other, other_optimizer, 1)
    hpdcp.load({"model": other, "optimizer": other_optimizer}, checkpoint_id=folder)
    _train(ranks, other, other_optimizer, 2)
    uninterrupted, resumed = _state(model, optimizer), _state(other, other_optimizer)
    assert _unequal(_full(uninterrupted["model"]), _full(resumed["model"])) == []
    assert _unequal(_full(uninterrupted["optimizer"]), _full(resumed["optimizer"])) == []


def test_fsdp_over_tp_on_one_dim_is_really_strided_here(ranks: Job) -> None:
    model, _ = _start(ranks, "FSDP x TP", seed=0)
    placements = {type(placement) for tensor in model.state_dict().values() if isinstance(tensor, DTensor)
                  for placement in tensor.placements}  # fmt: skip
    assert _StridedShard in placements


def test_a_fresh_optimizer_takes_states_it_does_not_have_yet(ranks: Job, folder: Path) -> None:
    model, optimizer = _start(ranks, "FSDP", seed=0)
    _train(ranks, model, optimizer, 2)
    hpdcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    other, fresh = _start(ranks, "FSDP x TP", seed=1)
    assert not fresh.state_dict()["state"]
    assert hpdcp.allocate_optimizer_state(fresh, checkpoint_id=folder) > 0
    hpdcp.load({"model": other, "optimizer": fresh}, checkpoint_id=folder)
    assert fresh.param_groups[0]["lr"] == 0.01
    saved, loaded = _state(model, optimizer), _state(other, fresh)
    assert _unequal(_full(saved["model"]), _full(loaded["model"])) == []
    assert _unequal(_full(saved["optimizer"]), _full(loaded["optimizer"])) == []


def test_a_flattened_state_dict_loads_what_a_nested_one_saved_and_the_other_way_round(ranks: Job, folder: Path) -> None:
    model, optimizer = _start(ranks, "FSDP x TP", seed=0)
    _train(ranks, model, optimizer, 1)
    nested = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), 3: {"x": [torch.ones(2), 5]}}
    flat, mappings = flatten_state_dict(nested)
    rebuilt = unflatten_state_dict(flat, mappings)
    assert rebuilt.keys() == nested.keys()
    assert rebuilt["optimizer"]["param_groups"] == nested["optimizer"]["param_groups"]
    assert rebuilt["optimizer"]["state"].keys() == nested["optimizer"]["state"].keys()
    assert rebuilt["model"]["0.up.weight"] is nested["model"]["0.up.weight"]

    def blank(state: dict[Any, Any]) -> dict[Any, Any]:
        names, paths = flatten_state_dict(state)
        empty = {}
        for name, value in names.items():
            empty[name] = value.clone() if torch.is_tensor(value) else None
            if torch.is_tensor(value):
                local_of(empty[name]).fill_(ranks.sentinel())
        return unflatten_state_dict(empty, paths)

    forms: dict[str, tuple[Any, Callable[[], Any]]] = {"flat": (flat, lambda: nested), "nested": (nested, lambda: flat)}
    for form, (saved, other) in forms.items():
        hpdcp.save(saved, checkpoint_id=folder / form)
        target = blank(other())
        hpdcp.load(target, checkpoint_id=folder / form)
        loaded, _ = flatten_state_dict(target)
        assert _unequal(_full(flat), _full(loaded)) == [], form
