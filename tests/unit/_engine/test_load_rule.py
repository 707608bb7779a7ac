"""Which targets ask for what: random states, saved and loaded into targets that differ, against the words of the page.

The model below is written from `docs/explanation/state.md`, over nested values; it knows no names, paths or plans.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

import hpdcp
from hpdcp._base.errors import LoadMismatchError, MissingKeysError
from hpdcp._state.comparable import comparable
from hpdcp._state.objects import encode


class Object:
    """Stateful; keeps what it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Absent:
    """Nothing is stored there."""


ABSENT: Final = Absent()
KEYS = st.sampled_from(["a", "b", "c", "d"])
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "x", "y"]) | st.just(0.5)
TENSORS = st.integers(1, 9).map(lambda value: torch.full((2,), float(value)))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(KEYS, inner, max_size=3)
    sequences = st.lists(inner, max_size=3)
    return mappings | sequences | sequences.map(tuple) | mappings.map(Object)


TREES = st.recursive(SCALARS | TENSORS, containers, max_leaves=10)
STATES = st.dictionaries(KEYS, TREES, max_size=4)


def is_walked(value: Any) -> bool:
    """Whether the parts of a value are stored, and are targets, by names of their own."""
    if isinstance(value, Object):
        return is_walked(value.state)
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, (list, tuple)) and holds_state(value)


def holds_state(value: Any) -> bool:
    """Whether there is a tensor or an object below."""
    if isinstance(value, (torch.Tensor, Object)):
        return True
    return any(map(holds_state, parts(value).values()))


def holds_tensor(value: Any) -> bool:
    value = plain(value)
    return isinstance(value, torch.Tensor) or any(map(holds_tensor, parts(value).values()))


def parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}


def plain(value: Any) -> Any:
    """With the state of every object in its place."""
    if isinstance(value, Object):
        return plain(value.state)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


class Model:
    """What a load makes of a target, and which names it finds missing."""

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.misfits: set[str] = set()
        """Names for which something else is stored than is wanted."""

    def load(self, stored: Any, target: Any, name: str = "", *, all_below: bool = False) -> Any:
        if isinstance(target, Object):
            inner = self.load(stored, target.state, name, all_below=True)
            return Object(inner)
        stored = stored.state if isinstance(stored, Object) else stored
        if isinstance(target, torch.Tensor):
            if isinstance(stored, torch.Tensor):
                return stored
            (self.missing if stored is ABSENT or is_walked(stored) else self.misfits).add(name)
            return target
        if not is_walked(target):
            return self._whole(stored, target, name)
        if isinstance(target, dict):
            return self.mapping(stored, target, name, all_below=all_below)
        return self._sequence(stored, target, name, all_below)

    def _whole(self, stored: Any, target: Any, name: str) -> Any:
        """A target that is no mapping, an empty one, or a list without tensors takes whatever is stored there."""
        if isinstance(stored, torch.Tensor):
            self.misfits.add(name)
        elif stored is ABSENT or holds_tensor(stored):
            self.missing.add(name)
        return plain(stored)

    def mapping(self, stored: Any, target: Any, name: str = "", *, all_below: bool = False) -> Any:
        there = stored if isinstance(stored, dict) else {}
        if isinstance(stored, (torch.Tensor, list, tuple)) or (stored is not ABSENT and not isinstance(stored, dict)):
            self.misfits.add(name)
        found = {
            key: self.load(there.get(key, ABSENT), item, f"{name}.{key}" if name else key, all_below=all_below)
            for key, item in target.items()
        }
        if all_below:
            found |= {k: plain(item) for k, item in there.items() if k not in target and not holds_tensor(item)}
        return found

    def _sequence(self, stored: Any, target: Any, name: str, all_below: bool) -> Any:
        if stored is not ABSENT and (type(stored) is not type(target) or len(stored) != len(target)):
            self.misfits.add(name)
            return target
        there = parts(stored)
        items = [
            self.load(there.get(n, ABSENT), item, f"{name}.{n}", all_below=all_below) for n, item in enumerate(target)
        ]
        return type(target)(items)


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """A target for what was saved: blank, and here and there with other keys, another length, or nothing in it."""
    if draw(st.integers(0, 11)) == 0:
        return draw(st.sampled_from([None, {}, [], 7]))
    if isinstance(value, Object):
        return Object(draw(mutated(value.state)))
    if isinstance(value, dict):
        items = {key: draw(mutated(item)) for key, item in value.items() if draw(st.integers(0, 7))}
        return items | (draw(st.dictionaries(KEYS, TREES, max_size=1)) if draw(st.integers(0, 5)) == 0 else {})
    if isinstance(value, (list, tuple)):
        listed = [draw(mutated(item)) for item in value]
        if draw(st.integers(0, 9)) == 0:
            listed = listed[:-1] if draw(st.booleans()) else [*listed, draw(TREES)]
        return type(value)(listed)
    return torch.zeros(2) if isinstance(value, torch.Tensor) else draw(SCALARS)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    stored = draw(STATES)
    target = draw(mutated(stored))
    return stored, target if isinstance(target, dict) else {}


def as_bytes(value: Any) -> bytes:
    return comparable(encode(plain(value), key="").data)


def mappings(value: Any) -> Iterator[dict[Any, Any]]:
    """Those in the caller's hands: not those of objects."""
    if is_walked(value) and not isinstance(value, Object):
        if isinstance(value, dict):
            yield value
        for item in parts(value).values():
            yield from mappings(item)


T: Final = torch.ones(2)


@example(({}, {"a": T}))
@example(({"a": [1, T]}, {"a": [1]}))
@example(({"a": [1, 2]}, {"a": [1, T]}))
@example(({"a": [1, [2, T]]}, {"a": [1, [2]]}))
@example(({"a": Object({"b": {"c": [1], "d": {"a": T, "b": 1}}})}, {"a": Object({"b": {"a": 0}})}))
@example(({"a": Object([1, {"b": T}])}, {"a": Object([1, {"b": T, "c": 2}])}))
@example(({"a": {"b": {}}}, {"a": {"b": {"c": 1}}}))
@example(({"a": {"b": {"c": 1}}}, {"a": {"b": {}}}))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(cases())
def test_a_load_does_what_the_page_says(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stored, target = case
    model = Model()
    before = copy.deepcopy(target)
    expected = model.mapping(copy.deepcopy(stored), copy.deepcopy(target))
    with tempfile.TemporaryDirectory() as folder:
        hpdcp.save(stored, checkpoint_id=folder, no_dist=True)
        held = list(mappings(target))
        refused: LoadMismatchError | None = None
        try:
            hpdcp.load(target, checkpoint_id=folder, no_dist=True)
        except LoadMismatchError as error:
            refused = error
    event("loaded" if refused is None else type(refused).__name__)
    assert (refused is not None) == bool(model.missing or model.misfits), (stored, before, refused)
    if refused is None:
        assert as_bytes(target) == as_bytes(expected), (stored, before, plain(target))
        assert {id(each) for each in held} <= {id(each) for each in mappings(target)}
        return
    assert as_bytes(target) == as_bytes(before)
    if not model.misfits and type(refused) is MissingKeysError:
        # Of a list that cannot take what is stored, its items may be what is missing. What is missing inside of a list
        # that was stored whole is found out later, while reading.
        assert any(f"'{name}'" in str(refused) or f"'{name}." in str(refused) for name in model.missing), refused
