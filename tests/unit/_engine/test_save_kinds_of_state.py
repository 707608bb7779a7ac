"""State dicts as people have them, in one process: keys, nesting and values come back exactly as they were."""

from __future__ import annotations

import datetime
import math
from collections import OrderedDict, namedtuple
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hpdcp
from hpdcp import PerRank
from hpdcp._base.errors import StateDictError, UnsupportedTypeError, WorldSizeError

Pair = namedtuple("Pair", ["first", "second"])


def _same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(x) is type(y) for x, y in zip(a, b, strict=True)) and all(
            _same(a[key], b[key]) for key in a
        )  # fmt: skip
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1, -(10**40), 0.1, -0.0, float("nan"), float("inf"), 1 + 2j, "text \udc80", b"bytes", (), [], {},
        (1,),
        [1, [2, (3, {})]], {1: "int", "1": "text"}, {(1, 2): 3}, {"a": {"b": []}}, {1, 2}, frozenset({3}), range(3),
        slice(1, None), datetime.datetime(2026, 1, 2, 3, 4, 5), PurePosixPath("a/b"), torch.Size([2, 3]),
        torch.bfloat16, torch.device("cpu"), np.float16(1.5), np.int64(3), np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array(["a", "bc"]), OrderedDict(b=1, a=2),
    ],
    ids=repr,
)  # fmt: skip
def test_a_python_value_comes_back_with_its_type(tmp_path: Path, value: object) -> None:
    hpdcp.save({"value": value, "nested": {"deep": [value]}}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"value": "before", "nested": {"deep": [None]}}
    hpdcp.load(state, checkpoint_id=tmp_path)
    assert _same(state["value"], value)
    assert _same(state["nested"]["deep"], [value])


def test_values_that_grew_shrank_or_changed_kind_come_back_as_stored(tmp_path: Path) -> None:
    stored = {"grew": [1, 2, 3], "shrank": {"a": 1}, "kind": (1,), "step": 7, "deep": {"list": [{"x": 1}]}}
    hpdcp.save(stored, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"grew": [], "shrank": [0, 0], "kind": None, "step": 1.5, "deep": {"list": []}}
    hpdcp.load(state, checkpoint_id=tmp_path)
    assert _same(state, stored)


def test_keys_of_any_type_lead_to_tensors_and_back(tmp_path: Path) -> None:
    def state(fill: float) -> dict[Any, Any]:
        def tensor() -> torch.Tensor:
            return torch.full((2,), fill)

        return {
            1: {"a.b": tensor(), 2: [tensor(), (tensor(), {"in a tuple": tensor()})]},
            ("t", 3): {"x": tensor()},
            None: tensor(),
            False: {"": tensor()},
            "pair": Pair(tensor(), "text"),
            "ordered": OrderedDict(z=tensor(), a=tensor()),
            "empty": {"beside": tensor(), "dict": {}, "list": [], "tuple": ()},
        }

    saved = state(1.0)
    hpdcp.save(saved, checkpoint_id=tmp_path)
    target = state(0.0)
    kept = target[1]["a.b"]
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert _same(target, saved)
    assert target[1]["a.b"] is kept


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}},
        {1: torch.zeros(1), "1": torch.zeros(1)},
        {"a": {"b.c": torch.zeros(1), "b": {"c": 3, "d": torch.zeros(1)}}},
        {"x": [torch.zeros(1)], "x.0": 5},
    ],
    ids=["a dot", "1 and '1'", "a dot below", "an index"],
)
def test_two_paths_of_one_name_are_refused_naming_both(tmp_path: Path, state: dict[Any, Any]) -> None:
    with pytest.raises(StateDictError, match=r"\(.*\) and \(.*\) both have the name"):
        hpdcp.save(state, checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists()


class Loader:
    """Keeps its place, a tensor, and another object that keeps its own."""

    def __init__(self, at: int, inner: Loader | None = None) -> None:
        self.at = at
        self.cache = torch.full((3,), float(at))
        self.inner = inner
        self.calls: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "cache": self.cache} | ({} if self.inner is None else {"inner": self.inner})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(state)
        self.at = state["at"]


def test_objects_with_a_state_dict_are_asked_and_given_it_back_once(tmp_path: Path) -> None:
    hpdcp.save({"loader": Loader(5, Loader(6)), "list": [Loader(7)]}, checkpoint_id=tmp_path)
    outer, inner, third = Loader(0, Loader(0)), Loader(0), Loader(0)
    outer.inner = inner
    state = {"loader": outer, "list": [third]}
    hpdcp.load(state, checkpoint_id=tmp_path)
    assert state == {"loader": outer, "list": [third]}
    assert [(x.at, x.cache.tolist(), len(x.calls)) for x in (outer, inner, third)] == [
        (5, [5, 5, 5], 1),
        (6, [6, 6, 6], 1),
        (7, [7, 7, 7], 1),
    ]


def test_modules_optimizers_and_schedulers_are_such_objects(tmp_path: Path) -> None:
    def job(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        for _ in range(seed):
            scheduler.step()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    saved, loaded = job(2), job(0)
    hpdcp.save(saved, checkpoint_id=tmp_path)
    hpdcp.load(loaded, checkpoint_id=tmp_path)
    for name, thing in saved.items():
        assert _same(loaded[name].state_dict(), thing.state_dict()), name
    assert loaded["scheduler"].last_epoch == 2


def test_a_save_changes_nothing_of_the_state(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    inner = {"w": weight, "list": [weight, 1]}
    state = {"inner": inner, "own": PerRank({"x": 1})}
    hpdcp.save(state, checkpoint_id=tmp_path)
    assert state["inner"] is inner
    assert inner["w"] is weight
    assert list(state) == ["inner", "own"]
    assert weight.requires_grad
    assert weight.grad is None


def test_per_rank_state_of_one_process_comes_back(tmp_path: Path) -> None:
    hpdcp.save(
        {"rng": PerRank({"torch": torch.get_rng_state(), "n": [1]}), "plain": PerRank(3)}, checkpoint_id=tmp_path
    )
    state = {"rng": PerRank({"torch": torch.zeros_like(torch.get_rng_state()), "n": None}), "plain": PerRank(None)}
    hpdcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["rng"].value["torch"], torch.get_rng_state())
    assert state["rng"].value["n"] == [1]
    assert state["plain"].value == 3
    everyone = {"rng": PerRank.all(), "plain": PerRank.all()}
    hpdcp.load(everyone, checkpoint_id=tmp_path)
    assert everyone["plain"].value == [3]
    assert _same(everyone["rng"].value[0]["torch"], torch.get_rng_state())
    assert not issubclass(WorldSizeError, KeyError)


class Opaque:
    """Nothing that is stored as data."""


def test_a_value_that_only_pickle_knows_warns_at_save_and_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"'deep\.thing'.*allow_pickle"):
        hpdcp.save({"deep": {"thing": Opaque(), "t": torch.zeros(1)}}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"deep": {"thing": None}}
    with pytest.raises(hpdcp.errors.UnsafePickleError, match=r"'deep\.thing'"):
        hpdcp.load(state, checkpoint_id=tmp_path)
    assert state["deep"]["thing"] is None
    hpdcp.load(state, storage_reader=hpdcp.FileSystemReader(tmp_path, allow_pickle=True))
    assert isinstance(state["deep"]["thing"], Opaque)


def test_what_cannot_be_stored_at_all_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"'a\.callback'"):
        hpdcp.save({"a": {"callback": lambda: None, "t": torch.zeros(1)}}, checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists()
