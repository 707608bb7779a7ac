"""Tensors made of other tensors are stored with their class on record, and fill only targets of that class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import PerRank
from hpdcp._base.errors import LoadMismatchError, StateDictError, UnsupportedTypeError
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.replicas import drop_duplicates
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.standard_save_planner import StandardSavePlanner
from hpdcp._state._wrapper_kinds import wrapper_kind
from tests.golden.values import Scaled


class Other(Scaled):
    """Another class with tensors of the same names."""


class Nested(torch.Tensor):
    """Made of a tensor that is made of others."""

    inner: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor, context: Any = None) -> Nested:
        made: Nested = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner, made.context = inner, context
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], self.context

    __torch_dispatch__ = Scaled.__torch_dispatch__


def scaled(fill: int = 3, kind: type[Scaled] = Scaled, bits: int = 8) -> Scaled:
    return kind(torch.full((2, 3), fill, dtype=torch.int8), torch.full((2,), float(fill)), bits)


def parts(fill: int = 0) -> dict[str, torch.Tensor]:
    return {"codes": torch.full((2, 3), fill, dtype=torch.int8), "scale": torch.full((2,), float(fill))}


def is_filled(tensor: Any, fill: int = 3) -> bool:
    return bool((tensor.codes == fill).all() and (tensor.scale == fill).all())


class Holder:
    """Stateful."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


@pytest.mark.parametrize(
    ("place", "found"),
    [
        (lambda t: t, lambda v: v),
        (lambda t: {"deep": [t]}, lambda v: v["deep"][0]),
        (lambda t: Holder(t), lambda v: v.weight),
        (lambda t: PerRank({"mine": t}), lambda v: v.value["mine"]),
        (lambda t: Nested(t), lambda v: v.inner),
    ],
    ids=["plain", "nested containers", "stateful", "per rank", "inside another"],
)
def test_a_target_of_the_same_class_is_filled(
    tmp_path: Path, place: Callable[[Any], Any], found: Callable[[Any], Any]
) -> None:
    hpdcp.save({"w": place(scaled()), "b": torch.ones(1)}, checkpoint_id=tmp_path)
    target = {"w": place(scaled(0)), "b": torch.zeros(1)}
    memory = found(target["w"]).codes
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert type(found(target["w"])) is Scaled and is_filled(found(target["w"])) and found(target["w"]).codes is memory


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (torch.zeros(2, 3), "wanted as a plain tensor"),
        (torch.nn.Parameter(torch.zeros(2, 3)), "wanted as a plain tensor"),
        (parts(), "wanted as a builtins:dict"),
        (None, "wanted as a builtins:NoneType"),
        (scaled(0, Other), "wanted as a .*:Other"),
        (scaled(0, bits=4), r'"bits":8.* wanted with .*"bits":4'),
        (Nested(scaled(0)), "wanted as a .*:Nested"),
    ],
    ids=["tensor", "parameter", "dict", "value", "class", "attributes", "nesting"],
)
def test_every_other_target_is_refused_by_key_before_anything_changes(tmp_path: Path, target: Any, said: str) -> None:
    hpdcp.save({"m": {"w": scaled(), "b": torch.ones(1)}}, checkpoint_id=tmp_path)
    beside = torch.zeros(1)
    with pytest.raises(
        LoadMismatchError, match=rf"^1 key is .*'m\.w' \(stored as a tests\.golden\.values:Scaled.*{said}"
    ):
        hpdcp.load({"m": {"w": target, "b": beside}}, checkpoint_id=tmp_path)
    assert not beside.any()
    hpdcp.load({"m": {"b": beside}}, checkpoint_id=tmp_path)
    assert beside.all()


@pytest.mark.parametrize("stored", [torch.ones(2, 3), 7], ids=["a tensor", "a value"])
def test_one_that_was_not_stored_so_does_not_fill_it(tmp_path: Path, stored: Any) -> None:
    hpdcp.save({"w": stored}, checkpoint_id=tmp_path)
    with pytest.raises(LoadMismatchError, match=r"'w' \(stored as one tensor or value, wanted as a .*:Scaled"):
        hpdcp.load({"w": scaled(0)}, checkpoint_id=tmp_path)


def test_a_dict_as_earlier_versions_stored_it_fills_it(tmp_path: Path) -> None:
    hpdcp.save({"w": parts(3)}, checkpoint_id=tmp_path)
    target = scaled(0)
    hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert is_filled(target)


def test_it_is_never_made_without_a_target(tmp_path: Path) -> None:
    hpdcp.save({"w": scaled(), "rng": PerRank({"t": scaled()}), "b": torch.ones(1)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(LoadMismatchError, match=r"'rng\.t\.codes' \(inside a .*Scaled"):
        hpdcp.load({"rng": PerRank.all()}, checkpoint_id=tmp_path / "a")
    with pytest.raises(LoadMismatchError, match=r"2 keys .*'rng\.t' .*'w' "):
        hpdcp.offline_transform.convert_dcp_to_torch(tmp_path / "a", tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


class Coarse(torch.optim.SGD):
    """Keeps a state of a tensor class, as 8-bit optimizers do."""

    def fill(self, value: int) -> Coarse:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum"] = scaled(value)
        return self


def test_an_optimizer_state_of_such_a_class_is_not_made_up(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    hpdcp.save({"optimizer": Coarse([parameter]).fill(3)}, checkpoint_id=tmp_path)
    fresh = Coarse([parameter])
    with pytest.raises(
        LoadMismatchError, match=r"'optimizer\.state\.0\.momentum\.codes' is inside a .*Scaled.*step\(\)"
    ):
        hpdcp.allocate_optimizer_state(fresh, checkpoint_id=tmp_path)
    assert not fresh.state
    fresh.fill(0)
    assert hpdcp.allocate_optimizer_state(fresh, checkpoint_id=tmp_path) == 0
    memory = fresh.state[parameter]["momentum"]
    hpdcp.load({"optimizer": fresh}, checkpoint_id=tmp_path)
    assert is_filled(memory)


@dataclass
class Settings:
    block: int
    device: torch.device
    requires_grad: bool


CPU = torch.device("cpu")


class Unprintable:
    pass


def test_attributes_are_compared_by_value_where_they_are_plain_and_by_class_elsewhere() -> None:
    def kind(context: Any) -> str:
        return wrapper_kind(Nested(torch.ones(1), context), "w")

    assert kind({"block": 2}) != kind({"block": 3})
    assert (
        kind(Settings(2, CPU, False)) == kind(Settings(2, torch.device("meta"), True)) != kind(Settings(3, CPU, False))
    )
    assert kind([torch.device("cpu")]) == kind([torch.device("meta")])
    assert kind(Unprintable()) == kind(Unprintable()) != kind(object())
    assert kind((torch.float32, torch.Size([2]))) != kind((torch.float16, torch.Size([2])))
    long = ["x" * 5000, 1], ["x" * 5000, 2]
    assert kind(long[0]) != kind(long[1]) and len(kind(long[0])) < 2000


def test_a_tensor_among_the_attributes_is_refused_at_save(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"^'m\.w' is a .*Nested, which has a tensor among its attributes"):
        hpdcp.save({"m": {"w": Nested(torch.ones(1), {"table": [torch.ones(2)]})}}, checkpoint_id=tmp_path)


def test_attributes_that_change_from_save_to_save_are_on_record(tmp_path: Path) -> None:
    for bits in (8, 4):
        hpdcp.save({"w": scaled(bits=bits)}, checkpoint_id=tmp_path)
    target = scaled(0, bits=4)
    hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert is_filled(target)
    with pytest.raises(LoadMismatchError, match="'w'"):
        hpdcp.load({"w": scaled(0)}, checkpoint_id=tmp_path)


def planned(value: Any, rank: int) -> SavePlan:
    planner = StandardSavePlanner()
    planner.configure_planner({"w": value, f"own{rank}": torch.ones(1)}, PlannerContext(rank, 2, rank == 0, True))
    return planner.build_local_plan()


@pytest.mark.parametrize("other", [scaled(kind=Other), scaled(bits=4), parts(3)], ids=["class", "attributes", "dict"])
def test_ranks_that_mean_different_classes_by_one_name_are_told(other: Any) -> None:
    for first, second in ((scaled(), other), (other, scaled())):
        plans = [planned(first, 0), planned(second, 1)]
        with pytest.raises(StateDictError, match=r"ranks disagree on 2 keys: 'w\.codes' is .* inside a .*Scaled"):
            drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    same = [planned(scaled(), 0), planned(scaled(), 1)]
    assert len(drop_duplicates(same, remove_redundancy=True, to_minimum_rank=False)[1].entries) == 4


def test_a_key_that_looks_like_a_mark_is_a_key(tmp_path: Path) -> None:
    hpdcp.save({"tensor@a:B": {"tensor@c:D": torch.ones(2), "e": 1}}, checkpoint_id=tmp_path)
    target: dict[str, Any] = {"tensor@a:B": {"tensor@c:D": torch.zeros(2), "e": 0}}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert target["tensor@a:B"]["tensor@c:D"].all() and target["tensor@a:B"]["e"] == 1
