"""Values are compared by what they mean, and a difference is said where it is."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpdcp._state.comparable import comparable, difference
from hpdcp._state.objects import PickledObjectWarning, encode

NAN = float("nan")
ARRAYS = np.arange(300.0), np.ones(400)


def same(left: object, right: object) -> bool:
    return comparable(encode(left, key="").data) == comparable(encode(right, key="").data)


def said(left: object, right: object, key: str = "k") -> str:
    return difference(encode(left, key="").data, encode(right, key="").data, key=key)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([{"a": 1, "b": 2}], [{"b": 2, "a": 1}]),
        ([{1: "x", None: [2]}], [{None: [2], 1: "x"}]),
        (Counter("aab"), Counter("baa")),
        (defaultdict(list, a=[1], b=[2]), defaultdict(list, b=[2], a=[1])),
        ((0.0, [0.0]), (-0.0, [-0.0])),
        (complex(0.0, -0.0), complex(-0.0, 0.0)),
        (NAN, -NAN),
        ([np.frombuffer(b"\x01\x00\x00\x00\x00\x00\xf8\x7f").item()], [NAN]),
        ({1, frozenset([0.0])}, {frozenset([-0.0]), 1}),
        ([{"a": ARRAYS[0], "b": ARRAYS[1]}], [{"b": ARRAYS[1], "a": ARRAYS[0]}]),
        ([{"a": b"x" * 900, "b": b"y" * 900, "n": NAN}], [{"b": b"y" * 900, "n": -NAN, "a": b"x" * 900}]),
        ([OrderedDict([("a", {"x": 1, "y": 2})])], [OrderedDict([("a", {"y": 2, "x": 1})])]),
    ],
    ids=repr,
)
def test_what_means_the_same_is_equal(left: Any, right: Any) -> None:
    assert same(left, right) and same(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (1, True),
        ("1", 1),
        ([1, 2], [2, 1]),
        ((1,), [1]),
        ([OrderedDict(a=1, b=2)], [OrderedDict(b=2, a=1)]),
        ([{"a": ARRAYS[0], "b": ARRAYS[1]}], [{"a": ARRAYS[1], "b": ARRAYS[0]}]),
        (float("inf"), NAN),
        (float("inf"), -float("inf")),
        ({1}, frozenset([1])),
        ([{"a": None}], [{}]),
        ([{"a": None}], [{"b": None}]),
        (torch.float32, torch.float16),
    ],
    ids=repr,
)
def test_what_means_something_else_differs(left: Any, right: Any) -> None:
    assert not same(left, right) and said(left, right)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def shuffled(value: Any) -> Any:
    """The same, with every dict the other way round and every zero of the other sign."""
    if type(value) in (list, tuple):
        return type(value)(map(shuffled, value))
    if type(value) is dict:
        return {key: shuffled(value[key]) for key in reversed(value)}
    return -value if type(value) is float and (value == 0 or value != value) else value


@given(VALUES)
def test_any_value_equals_itself_in_another_order(value: Any) -> None:
    assert same(value, shuffled(value)) and same(value, value)


@given(VALUES, VALUES)
def test_a_difference_is_said_exactly_where_there_is_one(left: Any, right: Any) -> None:
    equal = repr(shuffled(shuffled(left))) == repr(right)
    assert not equal or same(left, right)
    assert same(left, right) or said(left, right)


def test_the_difference_is_said_by_where_it_is_and_what_each_has_there() -> None:
    assert said(0.1, 0.2) == "0.1 and 0.2"
    assert said([{"lr": 0.1, "betas": (0.9, 1)}], [{"betas": (0.9, 2), "lr": 0.1}]) == "1 and 2 at [0]['betas'][1]"
    assert said([1, [2, 3]], [1, [2, 3, 4]]) == "2 items and 3 items at [1]"
    assert said([{"a": 1, "b": 2}], [{"a": 1}]) == "with and without [0]['b']"
    assert said([{}], [{"new": 1}]) == "without and with [0]['new']"
    assert said({1, 2}, {2, 3}) == "{1} and {3}"
    assert said(1, "1") == "1 and '1'"
    assert said([OrderedDict(a=1, b=2)], [OrderedDict(b=2, a=1)]).startswith("the keys in the order ['a', 'b']")
    long = said("x" * 500 + "old", "x" * 500 + "new")
    assert "old" in long and "new" in long and len(long) < 200
    assert len(said(list(range(1000)), [0])) < 200 and len(said("a" * 1000, "b" * 1000)) < 200
    assert said(np.zeros(2), np.ones(2)) == "array([0., 0.]) and array([1., 1.])"


def test_text_under_the_names_of_secrets_is_not_shown() -> None:
    for found in (said("hunter2", "hunter3", key="api_key"), said([{"token": "hunter2"}], [{"token": "hunter3"}])):
        assert "hunter" not in found and "not shown" in found


def test_what_a_pickle_would_have_to_be_read_for_is_not_said() -> None:
    with pytest.warns(PickledObjectWarning):
        data = [comparable(encode(slice(n, object), key="").data) for n in range(2)]
    assert data[0] != data[1] and difference(*data, key="k") == ""
    assert data[0][:1] == b"P"
