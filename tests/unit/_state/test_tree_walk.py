"""Which values of a state dict are stored on their own, and under which names."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from hpdcp._base.errors import InvalidArgumentError, StateDictError, UnsupportedTypeError
from hpdcp._format.metadata import PerRank
from hpdcp._state.tree import StateTree, walk

T = torch.ones(2)


def names(state_dict: dict[Any, Any]) -> dict[str, Any]:
    return {leaf.fqn: leaf.value for leaf in walk(state_dict, rank=0)}


class Tally:
    """Stateful, without a tensor."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"n": 3, "history": [1, 2]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("walking loads nothing")


class Pair(torch.Tensor):
    """A tensor made of two."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        made.a, made.b = a, b
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("walking computes nothing")


def test_mappings_are_walked_into_and_of_sequences_those_that_hold_a_tensor() -> None:
    state = {"model": {"w": T, "b": [T, 1]}, "args": {"lr": 0.1, "betas": (0.9, 0.95)}, "step": 3, "rng": np.zeros(2)}
    found = names(state)
    assert list(found) == ["model.w", "model.b.0", "model.b.1", "args.lr", "args.betas", "step", "rng"]
    assert names({"a": {"b": 1, "c": {}}, "d": [{"e": 1}]}) == {"a.b": 1, "a.c": {}, "d": [{"e": 1}]}
    assert names({}) == {}


@pytest.mark.parametrize(
    "value",
    [
        {},
        OrderedDict(),
        defaultdict(list, a=[1]),
        Counter("ab"),
        MappingProxyType({"a": 1}),
        {1: "int", "1": "text"},
        {"a.b": 1, "a": {"b": 2}},
        {10**30: 1},
        {b"bytes": 1},
    ],
    ids=repr,
)
def test_a_mapping_that_paths_could_not_make_again_is_a_value(value: Any) -> None:
    assert names({"x": value}) == {"x": value}


@pytest.mark.parametrize(
    "key",
    [T, torch.nn.Parameter(T), object(), (1, T), frozenset([object()])],
    ids=["tensor", "parameter", "object", "tuple", "frozenset"],
)
@pytest.mark.parametrize(
    "inside", [lambda m: m, lambda m: [m], lambda m: [{"deep": (m,)}]], ids=["mapping", "list", "deep"]
)
def test_keys_that_no_other_process_has_are_refused_by_where_they_are(key: Any, inside: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"^'opt.*state_dict\(\)"):
        walk({"opt": inside({key: {"step": 1}})}, rank=0)


class Recorder:
    """Stateful; says in which order objects are asked and loaded."""

    def __init__(self, name: str, journal: list[str], inner: Any = None) -> None:
        self.name, self.journal, self.inner = name, journal, inner

    def state_dict(self) -> dict[str, Any]:
        self.journal.append(f"ask {self.name}")
        return {"n": 1} | ({} if self.inner is None else {"inner": self.inner})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.journal.append(f"load {self.name}")


@pytest.mark.parametrize("names_in_order", list(itertools.permutations(["a", "b", "z"])))
def test_objects_are_asked_and_loaded_in_one_order_whatever_that_of_the_keys(names_in_order: Any) -> None:
    journal: list[str] = []
    objects: dict[str, Any] = {
        "a": Recorder("a", journal),
        "b": {"y": Recorder("b.y", journal, Recorder("b.y.inner", journal)), "x": [Recorder("b.x", journal)]},
        "z": 1,
    }
    tree = StateTree({name: objects[name] for name in names_in_order}, rank=0)
    tree.finish()
    assert journal == [
        *("ask a", "ask b.x", "ask b.y", "ask b.y.inner"),
        *("load a", "load b.x", "load b.y.inner", "load b.y"),
    ]


def test_empty_containers_beside_tensors_are_values() -> None:
    assert names({"x": [T, {}, [], ()]}) == {"x.0": T, "x.1": {}, "x.2": [], "x.3": ()}


def test_keys_keep_their_types_in_paths() -> None:
    leaves = walk({1: {"a.b": T}, ("k", 2): (0, T), None: OrderedDict(x=[T])}, rank=0)
    assert [leaf.path for leaf in leaves] == [(1, "a.b"), (("k", 2), 0), (("k", 2), 1), (None, "x", 0)]
    assert [leaf.fqn for leaf in leaves] == ["1.a.b", "('k', 2).0", "('k', 2).1", "None.x.0"]
    assert leaves[-1].path.kinds == ("dict", "OrderedDict", "list")


@pytest.mark.parametrize(
    ("state", "fqn"),
    [({"a.b": 1, "a": {"b": T}}, "a.b"), ({1: T, "1": T}, "1"), ({"a": [T], "a.0": 3}, "a.0")],
    ids=str,
)
def test_two_paths_with_one_name_are_refused_naming_both(state: dict[Any, Any], fqn: str) -> None:
    with pytest.raises(StateDictError) as caught:
        walk(state, rank=0)
    first, second = list(state)
    assert repr(fqn) in str(caught.value)
    assert f"({first!r}," in str(caught.value)
    assert f"({second!r}," in str(caught.value)


def test_a_name_may_begin_with_another_name() -> None:
    assert list(names({"a": 1, "a.b": T, "": T})) == ["a", "a.b", ""]


def test_a_per_rank_value_is_owned_by_the_rank() -> None:
    leaves = walk({"rng": PerRank({"seed": 1, "state": [1, 2]}), "loader": PerRank([T, {"pos": 3}]), "s": 1}, rank=5)
    assert [(leaf.fqn, leaf.owner) for leaf in leaves] == [
        *(("rng.seed", 5), ("rng.state", 5), ("loader.0", 5), ("loader.1.pos", 5), ("s", None))
    ]


def test_a_stateful_object_is_replaced_by_its_state_asked_for_once() -> None:
    counter = Tally()
    module = torch.nn.Linear(2, 1)
    found = names({"sub": {"counter": counter, "lr": 1}, "again": counter, "model": module})
    assert found["sub.counter.n"] == 3
    assert found["again.history"] is found["sub.counter.history"]
    assert counter.calls == 1
    assert found["model.weight"].data_ptr() == module.weight.data_ptr()
    of_counter = ["sub.counter.n", "sub.counter.history"]
    assert list(found) == [*of_counter, "sub.lr", "again.n", "again.history", "model.weight", "model.bias"]


def test_a_class_with_the_two_methods_is_not_stateful() -> None:
    assert names({"kind": torch.nn.Linear}) == {"kind": torch.nn.Linear}


def test_an_optimizer_gives_tensors_by_name_and_its_settings_whole() -> None:
    weight = torch.nn.Parameter(T.clone())
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    found = names({"optimizer": optimizer})
    assert list(found) == [
        "optimizer.state.0.step",
        "optimizer.state.0.exp_avg",
        "optimizer.state.0.exp_avg_sq",
        "optimizer.param_groups",
    ]
    assert found["optimizer.param_groups"][0]["lr"] == 1e-3


def test_a_tensor_made_of_tensors_is_split_all_the_way() -> None:
    inner = [torch.full((2,), float(index)) for index in range(3)]
    found = names({"w": Pair(Pair(inner[0], inner[1]), inner[2])})
    assert list(found) == ["w.a.a", "w.a.b", "w.b"]
    assert all(value is expected for value, expected in zip(found.values(), inner, strict=True))


def test_a_parameter_is_one_tensor() -> None:
    parameter = torch.nn.Parameter(T)
    assert names({"w": parameter})["w"] is parameter


def test_any_mapping_is_walked_into_for_a_tensor() -> None:
    assert list(names({"view": MappingProxyType({"w": T})})) == ["view.w"]


def test_a_state_dict_must_be_a_mapping() -> None:
    with pytest.raises(InvalidArgumentError, match="builtins:list"):
        walk([T], rank=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_tensor", [True, False])
def test_a_container_within_itself_is_refused_by_name(with_tensor: bool) -> None:
    inner: dict[str, Any] = {"t": T if with_tensor else 1}
    inner["self"] = [inner]
    with pytest.raises(UnsupportedTypeError, match=r"'a\.b\.self\.0' .*contains itself"):
        walk({"a": {"b": inner}}, rank=0)


def test_nesting_without_end_is_refused() -> None:
    deep: Any = T
    for _ in range(300):
        deep = [deep]
    with pytest.raises(UnsupportedTypeError, match="200 levels"):
        walk({"deep": deep}, rank=0)


def test_one_container_in_two_places_is_no_cycle() -> None:
    shared = {"w": T}
    assert list(names({"a": shared, "b": [shared, shared]})) == ["a.w", "b.0.w", "b.1.w"]
