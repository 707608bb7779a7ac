"""A fresh optimizer gets its states from the checkpoint's metadata, and then loads them like anything else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, Adafactor, AdamW, Optimizer, RMSprop

import hpdcp
from hpdcp._base.errors import InvalidArgumentError, LoadMismatchError, MissingKeysError

MakeOptimizer = Callable[[nn.Module], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01),
    "AdamW with two groups": lambda model: AdamW(
        [{"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
         {"params": [p for p in model.parameters() if p.ndim != 1]}], amsgrad=True,
    ),
    "SGD with momentum": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
    "SGD, which keeps no state": lambda model: SGD(model.parameters(), lr=0.01),
    "RMSprop": lambda model: RMSprop(model.parameters(), momentum=0.5, centered=True),
    "Adafactor, whose states have shapes of their own": lambda model: Adafactor(model.parameters()),
}  # fmt: skip


class WithScalar(nn.Module):
    """A model with a 0-dim parameter, whose state has the shape of a step count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8.0).reshape(2, 4) + step).square().sum().backward()
        optimizer.step()


def tensors_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, (*path, key))


def assert_same_states(left: Optimizer, right: Optimizer) -> None:
    ours, theirs = dict(tensors_of(left.state_dict()["state"])), dict(tensors_of(right.state_dict()["state"]))
    assert ours.keys() == theirs.keys()
    for path, tensor in ours.items():
        assert tensor.dtype == theirs[path].dtype, path
        assert torch.equal(tensor, theirs[path]), path


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(7)
    return WithScalar()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_fresh_optimizer_loads_without_a_step(make: MakeOptimizer, model: nn.Module, tmp_path: Path) -> None:
    optimizer = make(model)
    train(model, optimizer)
    hpdcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)

    other = WithScalar()
    fresh = make(other)
    created = hpdcp.allocate_optimizer_state(fresh, checkpoint_id=tmp_path)
    assert created == sum(len(state) for state in optimizer.state.values())
    hpdcp.load({"model": other, "optimizer": fresh}, checkpoint_id=tmp_path)
    assert_same_states(fresh, optimizer)

    train(model, optimizer, 2)
    train(other, fresh, 2)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_allocated_is_zero_in_the_layout_of_its_parameter(model: nn.Module, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    hpdcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)

    transposed = WithScalar()
    transposed.layers[0].weight = nn.Parameter(torch.zeros(4, 3).T)
    fresh = OPTIMIZERS["AdamW"](transposed)
    hpdcp.allocate_optimizer_state(fresh, checkpoint_id=tmp_path)
    for parameter, state in fresh.state.items():
        assert state["exp_avg"].stride() == parameter.stride()
        assert not any(value.any() or value.requires_grad for value in state.values())


def test_the_stored_dtype_counts_and_not_the_parameters(model: nn.Module, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["SGD with momentum"](model)
    train(model, optimizer)
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to(torch.bfloat16)
    hpdcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)

    fresh = OPTIMIZERS["SGD with momentum"](WithScalar())
    hpdcp.allocate_optimizer_state(fresh, checkpoint_id=tmp_path)
    assert {state["momentum_buffer"].dtype for state in fresh.state.values()} == {torch.bfloat16}
    hpdcp.load({"optimizer": fresh.state_dict()}, checkpoint_id=tmp_path)
    assert_same_states(fresh, optimizer)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_states_by_name_are_matched_by_the_model(
    flatten: bool, compiled: bool, model: nn.Module, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    saved = {"train": {"optim": get_optimizer_state_dict(model, optimizer, options=options)}}
    hpdcp.save(saved, checkpoint_id=tmp_path)

    plain = WithScalar()
    # Its parameters come in another order, so that positions would be wrong.
    other = nn.Module.__new__(WithScalar)
    nn.Module.__init__(other)
    other.scale, other.layers = plain.scale, plain.layers
    wrapped = torch.compile(other) if compiled else other
    fresh = AdamW(reversed(list(other.parameters())), lr=0.01)
    created = hpdcp.allocate_optimizer_state(fresh, checkpoint_id=tmp_path, prefix="train.optim", model=wrapped)
    assert created == 15
    target = get_optimizer_state_dict(other, fresh, options=options)
    hpdcp.load({"train": {"optim": target}}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, fresh, target, options=options)
    for name, parameter in other.named_parameters():
        expected = optimizer.state[model.get_parameter(name)]
        assert all(torch.equal(fresh.state[parameter][key], value) for key, value in expected.items())


def test_an_optimizer_that_knows_its_names_needs_no_model(model: nn.Module, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    hpdcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    knowing = AdamW(WithScalar().named_parameters())
    assert hpdcp.allocate_optimizer_state(knowing, checkpoint_id=tmp_path, prefix="") == 15
    ignorant = AdamW(WithScalar().parameters())
    with pytest.raises(InvalidArgumentError, match=r"Pass model="):
        hpdcp.allocate_optimizer_state(ignorant, checkpoint_id=tmp_path, prefix="")


def test_states_that_exist_are_kept(model: nn.Module, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    hpdcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    before = copy.deepcopy(optimizer)
    del optimizer.state[model.scale]["exp_avg"]
    assert hpdcp.allocate_optimizer_state(optimizer, checkpoint_id=tmp_path) == 1
    assert not optimizer.state[model.scale]["exp_avg"].any()
    optimizer.state[model.scale]["exp_avg"].copy_(before.state_dict()["state"][0]["exp_avg"])
    assert_same_states(optimizer, before)


class Remembering(Optimizer):
    """Keeps Python values, lists and parameters without any tensor in its state, as LBFGS and others do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            state = self.state[parameter]
            state["calls"] = 3 + number
            if parameter.ndim:
                state["history"] = [parameter.grad.clone(), (parameter.grad * 2, 5)]


def test_nested_states_and_python_values_come_back(model: nn.Module, tmp_path: Path) -> None:
    optimizer = Remembering(model.parameters())
    train(model, optimizer, 1)
    hpdcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)

    fresh = Remembering(WithScalar().parameters())
    hpdcp.allocate_optimizer_state(fresh, checkpoint_id=tmp_path)
    assert all(state.get("calls") is None for state in fresh.state.values())
    hpdcp.load({"optimizer": fresh}, checkpoint_id=tmp_path)
    for ours, theirs in zip(
        fresh.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert ours["calls"] == theirs["calls"]
        assert ours.keys() == theirs.keys()
        if "history" in theirs:
            assert torch.equal(ours["history"][0], theirs["history"][0])
            assert torch.equal(ours["history"][1][0], theirs["history"][1][0])
            assert ours["history"][1][1] == 5


def test_an_unknown_prefix_is_an_error_that_names_the_optimizers(model: nn.Module, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    hpdcp.save({"model": model, "train": {"optimiser": optimizer}}, checkpoint_id=tmp_path)
    for prefix in ("optimizer", "model", "train", "model.scale", ""):
        with pytest.raises(MissingKeysError, match=r"'train\.optimiser'"):
            hpdcp.allocate_optimizer_state(optimizer, checkpoint_id=tmp_path, prefix=prefix)


def test_an_optimizer_of_another_model_is_refused(model: nn.Module, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    hpdcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "index")
    hpdcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "name")
    other = nn.Linear(2, 2)
    with pytest.raises(LoadMismatchError, match="this optimizer has 2 parameters"):
        hpdcp.allocate_optimizer_state(AdamW(other.parameters()), checkpoint_id=tmp_path / "index")
    with pytest.raises(LoadMismatchError, match="belongs to this optimizer"):
        hpdcp.allocate_optimizer_state(AdamW(other.parameters()), checkpoint_id=tmp_path / "name", model=other)


def test_a_place_is_needed(model: nn.Module) -> None:
    with pytest.raises(InvalidArgumentError, match=r"checkpoint_id= or storage_reader="):
        hpdcp.allocate_optimizer_state(OPTIMIZERS["AdamW"](model))


def test_a_save_without_collectives_serves_as_well(model: nn.Module, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer)
    hpdcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True, use_collectives=False)
    fresh = OPTIMIZERS["AdamW"](WithScalar())
    reader = hpdcp.FileSystemReader()
    assert hpdcp.allocate_optimizer_state(fresh, checkpoint_id=tmp_path, storage_reader=reader, no_dist=True) == 15
    hpdcp.load({"optimizer": fresh}, checkpoint_id=tmp_path)
    assert_same_states(fresh, optimizer)
