"""Python values come back from their bytes with their exact types, whatever is nested in what."""

from __future__ import annotations

import enum
import math
import random
import struct
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from uuid import UUID, uuid1

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._state.objects import decode, encode


class Color(enum.Enum):
    RED = 1
    CRIMSON = RED


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: Any


Pair = namedtuple("Pair", ["left", "right"])


def alike(a: object, b: object) -> bool:
    """Equal with equal types all the way down, orders included; nan equals nan, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex) and isinstance(b, complex):
        return alike(a.real, b.real) and alike(a.imag, b.imag)
    if isinstance(a, dict) and isinstance(b, dict):
        return alike([*a.items()], [*b.items()])
    if isinstance(a, (list, tuple, deque)) and isinstance(b, (list, tuple, deque)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def back(value: object) -> Any:
    stored = encode(value, key="some.key")
    assert not stored.pickled
    return decode(stored.data, key="some.key")


EXACT = [
    None,
    True,
    1,
    0,
    -1,
    1 << 63,
    -(1 << 63),
    10**5000,
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    "",
    "ünï\x00\u2028😀",
    "\ud800",
    "\ud83d\ude00",
    b"",
    b"\x00\xff" * 5,
    b"long" * 1000,
    bytearray(b"abc"),
    bytearray(2000),
    complex(-0.0, math.nan),
    (),
    ((1,), [2, (3,)]),
    [],
    {},
    {"$tuple": [1]},
    {"$": 1},
    {"a": {"$b": {}}, "c": []},
    {1: "int", "1": "str", None: 0, 2.5: 1, (1, "x"): 2, b"k": 3, frozenset({1}): 4, Color.RED: 5},
    {"z": 1, "a": 2},
    {"\ud800": 1},
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(list, {"x": [1]}),
    defaultdict(None, {1: 2}),
    Counter("abracadabra"),
    deque([1, 2, 3], maxlen=3),
    deque([1]),
    set(),
    {1, "a", (2, 3)},
    frozenset({frozenset(), 1.5}),
    range(3, 30, 4),
    slice(1, None, 2),
    datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
    datetime(2024, 2, 29, tzinfo=timezone.utc),  # noqa: UP017 - a timezone among others
    datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=-3, microseconds=7), "odd")),
    date(1, 1, 1),
    time(23, 59, 59, 999999, fold=1, tzinfo=timezone(timedelta(hours=5))),
    timedelta(days=-3, seconds=5, microseconds=1),
    timezone(timedelta(0), "UTC"),
    Path("/data/ünï"),
    PurePosixPath("a/../b"),
    PureWindowsPath("C:\\x"),
    UUID(int=7),
    uuid1(),
    Decimal("-0.00"),
    Decimal("1E+1000"),
    Fraction(-3, 7),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda", 3),
    torch.device("cpu"),
    Color.RED,
    Level.LOW,
    [Level.LOW, 1, True],
    Point(1, [Point(2, None)]),
    Pair("a", b"b"),
    random.Random(7).getstate(),
    {"betas": (0.9, 0.95), "lr": 1e-3, "params": [0, 1], "foreach": None, "name": "adamw"},
]


@pytest.mark.parametrize("value", EXACT, ids=lambda value: f"{type(value).__name__}")
def test_a_value_comes_back_with_its_exact_type(value: object) -> None:
    assert alike(back(value), value)


def test_a_signalling_decimal_and_a_safe_uuid_come_back() -> None:
    assert str(back(Decimal("sNaN12"))) == "sNaN12"
    value = uuid1()
    assert back(value).is_safe is value.is_safe


def test_the_alias_of_an_enum_member_is_the_member() -> None:
    assert back(Color.CRIMSON) is Color.RED


def test_a_timezone_without_offset_is_the_one_utc() -> None:
    assert back(timezone.utc) is timezone.utc  # noqa: UP017 - identity of timezone.utc is the point


def test_a_default_dict_keeps_its_factory_and_a_deque_its_length() -> None:
    assert back(defaultdict(list)).default_factory is list
    assert back(defaultdict(None)).default_factory is None
    assert back(deque([1], maxlen=9)).maxlen == 9


def test_an_ordered_dict_keeps_the_attributes_torch_gives_to_state_dicts() -> None:
    value = torch.nn.ReLU().state_dict()
    restored = back(value)
    assert type(restored) is OrderedDict
    assert vars(restored) == {"_metadata": OrderedDict({"": {"version": 1}})}


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
VALUES = st.recursive(
    KEYS | st.text(alphabet=st.characters(), max_size=5) | st.complex_numbers() | st.binary(max_size=600),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.lists(inner, max_size=4).map(deque)
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


def without_nan(value: object) -> object:
    """A picture of `value` in which equal means alike: nan is never equal, and sets have no order to compare by."""
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, complex):
        return ("complex", struct.pack(">dd", value.real, value.imag))
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted((without_nan(item) for item in value), key=repr))
    if isinstance(value, dict):
        return (type(value).__name__, [(without_nan(key), without_nan(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value).__name__, [without_nan(item) for item in value])
    return (type(value).__name__, value)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_any_nesting_comes_back(value: object) -> None:
    assert without_nan(back(value)) == without_nan(value)


class Money(int):
    pass


class Settings(dict[str, int]):
    pass


class Named(Pair):
    pass


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@pytest.mark.parametrize(
    "value",
    [Money(3), Settings(a=1), Named(1, 2), Access.READ | Access.WRITE, defaultdict(lambda: 3)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore::hpdcp._state.objects.PickledObjectWarning")
def test_a_subclass_never_comes_back_as_its_base(value: object) -> None:
    try:
        stored = encode([value], key="k")
    except UnsupportedTypeError:
        assert isinstance(value, defaultdict)
        return
    assert stored.pickled
    assert alike(decode(stored.data, key="k", allow_pickle=True), [value])


def test_a_list_that_contains_itself_is_refused_by_name() -> None:
    knot: list[object] = []
    knot.append(knot)
    with pytest.raises(UnsupportedTypeError, match=r"'loop\.key'.*contains itself"):
        encode({"a": knot}, key="loop.key")


def test_nesting_is_refused_before_it_could_not_be_read_back() -> None:
    value: object = 1
    for _ in range(200):
        value = (value,)
    assert alike(back(value), value)
    with pytest.raises(UnsupportedTypeError, match="200 levels"):
        encode((value,), key="k")


def test_what_not_even_pickle_takes_is_refused_with_its_key_and_class() -> None:
    with pytest.raises(UnsupportedTypeError, match=r"'a\.lock' holds a _thread:lock"):
        encode({"lock": threading.Lock()}, key="a.lock")
