"""How values of a state are copied by their type."""

from __future__ import annotations

import collections
import dataclasses
import enum
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from hpdcp import DataCopier, PerRank
from hpdcp._background._staging import with_copied_values


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    copies, warned = dict(DataCopier._copies), set(DataCopier._warned)
    yield
    DataCopier._copies.clear()
    DataCopier._copies.update(copies)
    DataCopier._warned.clear()
    DataCopier._warned.update(warned)


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    at: list[int]


@dataclasses.dataclass
class Progress:
    seen: list[int]


class Detailed(Progress):
    pass


class Counter(dict[str, int]):
    pass


def altered(value: Any) -> None:
    """Change every mutable part of it."""
    if isinstance(value, dict):
        for item in list(value.values()):
            altered(item)
        value["new"] = "later"
    elif isinstance(value, list):
        for item in value:
            altered(item)
        value.append("later")
    elif isinstance(value, tuple):
        for item in value:
            altered(item)
    elif isinstance(value, set):
        value.add("later")
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        value[...] = -1


@pytest.mark.parametrize(
    "make",
    [
        lambda: [1, [2, {"a": [3]}]],
        lambda: {"a": {"b": [1]}, 2: (1, [2])},
        lambda: {1, 2},
        lambda: Point([1, 2]),
        lambda: np.arange(4.0),
        lambda: collections.OrderedDict(b=[1], a=[2]),
        lambda: collections.defaultdict(list, a=[1]),
        lambda: Counter(a=1),
        lambda: torch.arange(4.0),
        lambda: torch.arange(4.0).share_memory_(),
        lambda: [torch.tensor([2.5]), np.array([1])],
    ],
)
def test_a_copy_does_not_change_when_the_value_does(make: Any) -> None:
    value, expected = make(), make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = DataCopier.copy(value)
    altered(value)
    assert type(copied) is type(expected)
    assert repr(copied) == repr(expected)


@pytest.mark.parametrize("value", [1, 2.5, "a", b"b", None, True, Colour.RED, Path("x"), range(3), np.float32(2)])
def test_what_cannot_change_is_not_copied(value: object) -> None:
    assert DataCopier.copy(value) is value


def test_a_tensor_that_needs_grad_is_copied_without_its_history() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    copied = DataCopier.copy(parameter * 2)
    assert not copied.requires_grad
    assert copied.tolist() == [2, 2]


def test_a_lazy_view_is_copied_as_what_it_shows() -> None:
    whole = torch.complex(torch.ones(3), torch.ones(3))
    assert DataCopier.copy(whole.conj()).tolist() == [1 - 1j] * 3
    assert DataCopier.copy(torch.arange(6.0).reshape(2, 3).t()).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_type_of_ones_own_is_copied_as_registered() -> None:
    @DataCopier.register(Progress)
    def copy_progress(progress: Progress) -> Progress:
        return type(progress)([*progress.seen, -1])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DataCopier.copy(Progress([1])).seen == [1, -1]
        # A class derived from it is copied by its closest base.
        assert type(DataCopier.copy(Detailed([1]))) is Detailed


def test_the_exact_type_goes_before_a_base_and_a_closer_base_before_a_farther_one() -> None:
    class Closest(Detailed):
        pass

    DataCopier.register(Progress)(lambda value: "progress")
    DataCopier.register(Detailed)(lambda value: "detailed")
    assert DataCopier.copy(Closest([])) == "detailed"
    DataCopier.register(Closest)(lambda value: "closest")
    assert DataCopier.copy(Closest([])) == "closest"
    assert DataCopier.copy(Progress([])) == "progress"


def test_a_dtensor_and_a_parameter_are_tensors() -> None:
    assert DataCopier.find(DTensor) is DataCopier.find(torch.Tensor)
    assert DataCopier.find(torch.nn.Parameter) is DataCopier.find(torch.Tensor)


def test_an_unknown_type_is_deep_copied_with_one_warning_for_it() -> None:
    value = Progress([1])
    with pytest.warns(UserWarning, match=r"Progress has no copier"):
        copied = DataCopier.copy(value)
    value.seen.append(2)
    assert copied.seen == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataCopier.copy(Progress([2]))
    with pytest.warns(UserWarning, match="Detailed"):
        DataCopier.copy(Detailed([1]))


def test_what_cannot_be_deep_copied_says_so() -> None:
    with pytest.warns(UserWarning, match="no copier"), pytest.raises(TypeError, match="pickle"):
        DataCopier.copy(item for item in ())


def test_in_a_state_only_values_are_copied_and_tensors_stay_what_they_are() -> None:
    DataCopier.register(Progress)(lambda progress: Progress(list(progress.seen)))
    tensor = torch.ones(2)
    state = {
        "model": {"w": tensor, "tied": tensor},
        "list": [tensor, {"deep": [1]}],
        "own": Progress([1]),
        "rank": PerRank({"own": Progress([2]), "t": tensor}),
        "module": torch.nn.Linear(1, 1),
    }
    copied = with_copied_values(state)
    assert copied["model"] is state["model"]
    assert copied["list"][0] is tensor
    assert copied["module"] is state["module"]
    assert copied["rank"].value["t"] is tensor
    state["own"].seen.append(9)
    state["rank"].value["own"].seen.append(9)
    assert copied["own"].seen == [1]
    assert copied["rank"].value["own"].seen == [2]
    assert set(state) == set(copied)


def test_a_state_of_a_rank_keeps_the_mark_for_all_ranks() -> None:
    DataCopier.register(Progress)(lambda progress: Progress(list(progress.seen)))
    marked = PerRank.all(Progress([1]))
    copied = with_copied_values({"a": marked})["a"]
    assert copied.value is not marked.value
    assert copied.every_rank
