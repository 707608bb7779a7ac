"""Flattening a state dict and paths alone rebuilding it, keys, nesting and kinds exact."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from hpdcp._base.errors import (
    CorruptCheckpointError,
    LoadMismatchError,
    MissingKeysError,
    StateDictError,
    UnsupportedTypeError,
)
from hpdcp._format.metadata import PerRank
from hpdcp._state.paths import Path, build_tree, decode_path, encode_path
from hpdcp._state.tree import flatten_state_dict, unflatten_state_dict, walk

T = torch.ones(2)
Moments = namedtuple("Moments", ["mean", "square"])


def shape_of(value: Any) -> Any:
    """A picture of a tree that compares types, keys, order and the identity of leaves."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, [(type(key).__name__, key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [shape_of(item) for item in value]
    return kind, id(value) if isinstance(value, (torch.Tensor, PerRank)) else value


EXAMPLE = {
    "model": OrderedDict([("a.b.weight", T), ("bias", T)]),
    "optimizer": {"state": {0: {"step": T, "m": Moments(T, 2)}, 10: {}}, "groups": [{"lr": 0.1}]},
    3: [(T, 1, ()), {}, [], None],
    ("tuple", 1): PerRank(1),
    None: {b"bytes": T, 2.5: [T]},
    True: "last",
}


def test_every_key_and_container_comes_back_as_it_was() -> None:
    flat, mappings = flatten_state_dict(EXAMPLE)
    assert all(type(value) is not Moments for value in flat.values())
    assert shape_of(unflatten_state_dict(flat, mappings)) == shape_of(EXAMPLE)


def test_names_are_those_of_a_save_and_paths_are_plain_tuples_of_keys() -> None:
    flat, mappings = flatten_state_dict(EXAMPLE)
    assert list(flat) == [leaf.fqn for leaf in walk(EXAMPLE, rank=0)]
    assert mappings["model.a.b.weight"] == ("model", "a.b.weight")
    assert mappings["optimizer.state.0.m.1"] == ("optimizer", "state", 0, "m", 1)


def test_a_flat_state_dict_has_the_names_of_the_nested_one() -> None:
    flat, _ = flatten_state_dict(EXAMPLE)
    assert [leaf.fqn for leaf in walk(flat, rank=0)] == list(flat)


def test_mappings_survive_a_pickle_and_the_trip_through_text() -> None:
    flat, mappings = flatten_state_dict(EXAMPLE)
    for copied in (
        pickle.loads(pickle.dumps(mappings)),
        {name: decode_path(encode_path(path)) for name, path in mappings.items()},
    ):
        assert shape_of(unflatten_state_dict(flat, copied)) == shape_of(EXAMPLE)


def test_plain_tuples_are_paths_through_dicts() -> None:
    assert unflatten_state_dict({"a.0": 1, "b": 2}, {"a.0": ("a", 0), "b": ("b",)}) == {"a": {0: 1}, "b": 2}


KEYS = (
    st.text(max_size=3)
    | st.sampled_from(["a", "b", "a.b", "0", "$x"])
    | st.integers(-3, 12)
    | st.booleans()
    | st.none()
    | st.tuples(st.text(max_size=2), st.integers())
    | st.binary(max_size=2)
)
LEAVES = st.builds(lambda: torch.zeros(1)) | st.integers() | st.text(max_size=3) | st.builds(PerRank, st.integers())
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.tuples(inner, inner).map(lambda pair: Moments(*pair))
    ),
    max_leaves=15,
)
STATE_DICTS = st.dictionaries(KEYS, TREES, max_size=4)


@settings(max_examples=150, deadline=None)
@given(STATE_DICTS)
def test_any_state_dict_is_rebuilt_from_its_paths_as_text(state: dict[Any, Any]) -> None:
    try:
        flat, mappings = flatten_state_dict(state)
    except StateDictError as error:
        assume("both have the name" not in str(error))
        raise
    texts = {name: encode_path(path) for name, path in mappings.items()}
    rebuilt = unflatten_state_dict(flat, {name: decode_path(text) for name, text in texts.items()})
    assert shape_of(rebuilt) == shape_of(state)


def test_a_name_without_a_path_is_refused_and_a_path_without_a_value_is_left_out() -> None:
    flat, mappings = flatten_state_dict({"a": {"x": T, "y": T}, "b": 1})
    with pytest.raises(MissingKeysError, match="'c', 'd'"):
        unflatten_state_dict({**flat, "c": 1, "d": 2}, mappings)
    del flat["a.x"]
    assert shape_of(unflatten_state_dict(flat, mappings)) == shape_of({"a": {"y": T}, "b": 1})


def test_a_list_is_not_closed_over_a_missing_item() -> None:
    flat, mappings = flatten_state_dict({"a": [T, T, T]})
    del flat["a.1"]
    with pytest.raises(StateDictError, match=r"'a' is a list .*item 1 is missing"):
        unflatten_state_dict(flat, mappings)


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a",), ("a",)],
        [Path(("a", 0), ("dict", "list")), Path(("a", 1), ("dict", "tuple"))],
        [()],
        [Path((0,), ("list",))],
    ],
    ids=str,
)
def test_paths_that_contradict_each_other_are_refused(paths: list[Any]) -> None:
    with pytest.raises(StateDictError):
        build_tree((path, index) for index, path in enumerate(paths))


def test_a_named_tuple_whose_class_is_elsewhere_is_refused_by_name() -> None:
    with pytest.raises(LoadMismatchError, match="elsewhere:Thing"):
        build_tree([(Path(("a", 0), ("dict", "elsewhere:Thing")), 1)])
    with pytest.raises(LoadMismatchError, match="os:stat_result"):
        build_tree([(Path(("a", 0), ("dict", "os:stat_result")), 1)])


def test_a_key_without_an_exact_form_is_refused() -> None:
    class Key:
        pass

    with pytest.raises(UnsupportedTypeError, match="Key"):
        encode_path(("a", Key()))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "3",
        '"a"',
        "[[]]",
        '[["a",1]]',
        "[[0,1,2]]",
        '[{"$list":[]}]',
        "[{}]",
        "[" * 9999,
        "[" + "0," * 500 + "0]",
    ],
)
def test_text_that_is_no_path_is_reported_as_damage(text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="path"):
        decode_path(text)
