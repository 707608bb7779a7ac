"""Loaded values go back to where they came from, and stateful objects get theirs once, innermost first."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from hpdcp._base.errors import MissingKeysError, StateDictError, UnsupportedTypeError
from hpdcp._format.metadata import PerRank
from hpdcp._state.tree import StateTree, pick

T = torch.ones(2)


class Point(NamedTuple):
    x: Any
    y: Any


class Box:
    """Stateful; keeps a journal of what is loaded, over all boxes."""

    journal: list[tuple[str, Any]]

    def __init__(self, name: str, state: Any, journal: list[tuple[str, Any]]) -> None:
        self.name, self.state, self.journal = name, state, journal

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.journal.append((self.name, state))


def test_values_are_written_into_the_callers_own_containers() -> None:
    inner, items, plain, empty = {"t": T, "n": 1}, [T, "old"], {"x": 1}, dict[str, Any]()
    state: dict[Any, Any] = {"a": inner, 3: items, "step": 0, "cfg": plain, "empty": empty}
    tree = StateTree(state, rank=0)
    for path, value in [(("a", "n"), 2), ((3, 1), "new"), (("step",), 7), (("cfg", "x"), 5), (("empty",), {"a": 1})]:
        tree.assign(path, value)
    assert state == {"a": inner, 3: items, "step": 7, "cfg": {"x": 5}, "empty": {"a": 1}}
    assert state["cfg"] is plain
    assert state["empty"] is empty
    assert inner["n"] == 2
    assert items[1] == "new"


def test_tuples_on_the_way_are_made_anew_and_keep_their_class() -> None:
    limits = torch.max(torch.ones(2, 2), 0)
    state: dict[str, Any] = {"p": Point(T, (1, Point({"k": T, "n": 0}, 2))), "limits": limits, "same": None}
    tree = StateTree(state, rank=0)
    tree.assign(("p", 1, 0), "first")
    tree.assign(("p", 1, 1, 1), "second")
    tree.assign(("p", 1, 1, 0, "n"), 9)
    assert type(state["p"]) is Point
    assert type(state["p"].y[1]) is Point
    assert state["p"] == Point(T, ("first", Point({"k": T, "n": 9}, "second")))
    tree.assign(("limits", 0), T)
    assert type(state["limits"]) is type(limits)
    assert state["limits"].values is T
    assert state["limits"].indices is limits.indices


def test_per_rank_marks_hold_the_loaded_value() -> None:
    state = {"rng": PerRank(1), "nested": PerRank((T, 2)), "many": PerRank.all({"w": T, "n": 0})}
    tree = StateTree(state, rank=2)
    assert [(leaf.fqn, leaf.path, leaf.value) for leaf in tree.every_rank] == [("many", ("many",), state["many"])]
    tree.assign(("rng",), {"seed": 4})
    tree.assign(("nested", 1), 5)
    tree.assign(("many",), ["of rank 0", "of rank 1"])
    assert state["rng"].value == {"seed": 4}
    assert state["nested"].value == (T, 5)
    assert state["many"].value == ["of rank 0", "of rank 1"]


def test_stateful_objects_are_loaded_once_and_innermost_first() -> None:
    journal: list[tuple[str, Any]] = []
    leaf = Box("leaf", {"n": 1}, journal)
    middle = Box("middle", {"leaf": leaf, "t": T, "m": 2}, journal)
    outer = Box("outer", {"middle": [middle], "o": 3}, journal)
    tree = StateTree({"x": outer, "y": leaf}, rank=0)
    tree.assign(("x", "middle", 0, "leaf", "n"), 10)
    tree.add(tree.containers["x.middle.0.leaf"], "new", 1)
    tree.assign(("y", "n"), 11)
    tree.assign(("x", "middle", 0, "m"), 20)
    tree.assign(("x", "o"), 30)
    tree.finish()
    tree.finish()
    assert journal == [
        ("leaf", {"n": 11}),
        ("middle", {"leaf": leaf, "t": T, "m": 20}),
        ("outer", {"middle": [middle], "o": 30}),
    ]


def test_a_stateful_object_that_refuses_its_state_is_named() -> None:
    class Strict(Box):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("n")

    tree = StateTree({"a": {"b": Strict("s", {}, [])}}, rank=0)
    with pytest.raises(KeyError) as caught:
        tree.finish()
    assert "'a.b'" in caught.value.__notes__[0]


def test_a_module_and_an_optimizer_take_their_state_through_the_tree() -> None:
    module = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    tree = StateTree({"model": module, "optimizer": optimizer}, rank=0)
    for leaf in tree.leaves:
        if isinstance(leaf.value, torch.Tensor):
            leaf.value.detach().fill_(7)
    groups = next(leaf for leaf in tree.leaves if leaf.fqn == "optimizer.param_groups").value
    tree.assign(("optimizer", "param_groups"), [{**groups[0], "lr": 0.25}])
    tree.finish()
    assert module.running_mean is not None
    assert module.running_mean.tolist() == [7, 7]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_the_items_of_a_value_become_leaves_when_it_is_stored_in_pieces() -> None:
    journal: list[tuple[str, Any]] = []
    box = Box("box", [1, ("x", "y")], journal)
    tree = StateTree({"box": box, "t": T}, rank=0)
    a, pair = tree.children(tree.leaves[0])
    assert (a.fqn, a.path, pair.fqn) == ("box.0", ("box", 0), "box.1")
    left, right = tree.children(pair)
    assert tree.children(pair) == [left, right]
    assert tree.children(left) == []
    tree.assign(a.path, 2)
    tree.assign(left.path, "X")
    tree.assign(right.path, "Y")
    tree.finish()
    assert journal == [("box", [2, ("X", "Y")])]
    assert box.state == [1, ("x", "y")]
    assert [leaf.fqn for leaf in tree.leaves] == ["box", "t"]


def test_an_item_with_another_leafs_name_is_refused() -> None:
    tree = StateTree({"a": [1], "a.0": T}, rank=0)
    with pytest.raises(StateDictError, match=r"'a\.0'"):
        tree.children(tree.leaves[0])


def test_only_leaves_can_be_assigned() -> None:
    tree = StateTree({"a": {"t": T}}, rank=0)
    with pytest.raises(MissingKeysError, match="'a'"):
        tree.assign(("a",), 1)


def test_a_mapping_that_cannot_be_set_says_so() -> None:
    tree = StateTree({"view": MappingProxyType({"t": T, "n": 1})}, rank=0)
    with pytest.raises(UnsupportedTypeError, match="mappingproxy"):
        tree.assign(("view", "n"), 2)


def test_pick_descends_a_value_by_keys_of_any_type() -> None:
    value = {"a": [OrderedDict({(1, 2): "deep"}), 1]}
    assert pick(value, ("a", 0, (1, 2))) == "deep"
    assert pick(value, ()) is value
    for path in (("b",), ("a", 5), ("a", "x"), ("a", 1, 0), ("a", 0, (1, 2), 0)):
        with pytest.raises(MissingKeysError):
            pick(value, path)


def test_an_object_that_empties_its_own_state_before_it_takes_the_loaded_one_gets_it() -> None:
    class Own(Box):
        def load_state_dict(self, state: Any) -> None:
            for name in ("a", "b"):
                self.state[name].clear()
                self.state[name].update(state[name])

    own = Own("own", {"a": {"n": 1}, "b": OrderedDict(deep={"m": 1})}, [])
    tree = StateTree({"own": own}, rank=0)
    tree.assign(("own", "a", "n"), 2)
    tree.assign(("own", "b", "deep", "m"), 3)
    tree.finish()
    assert own.state == {"a": {"n": 2}, "b": OrderedDict(deep={"m": 3})}
