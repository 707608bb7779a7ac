"""Tensors are stored as tensors, or refused: never as a part of an opaque value, and never before they are there."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import hpdcp
from hpdcp import PerRank
from hpdcp._base.errors import UnsupportedTypeError


@dataclass
class _State:
    step: int
    weight: torch.Tensor | None


class _Sub(torch.Tensor):
    pass


_HIDING = {
    "a set": {torch.ones(2)},
    "a deque": deque([torch.ones(2)]),
    "a namespace": SimpleNamespace(w=torch.ones(2)),
    "a dataclass": _State(1, torch.ones(2)),
    "a list of dataclasses": [1, [_State(1, torch.nn.Parameter(torch.ones(2)))]],
    "a subclass in a deque": deque([torch.ones(2).as_subclass(_Sub)]),
    "an array of objects": np.array([torch.ones(2), None], dtype=object),
    "a function's argument": functools.partial(print, torch.ones(2)),
}


@pytest.mark.parametrize("name", _HIDING)
def test_a_tensor_inside_an_opaque_value_is_refused_by_key(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"'extra\.value' is a .* with a tensor inside"):
        hpdcp.save({"w": torch.ones(2), "extra": {"value": _HIDING[name], "t": torch.ones(1)}}, checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists()


def test_values_without_tensors_and_what_each_rank_keeps_for_itself_are_stored_as_before(tmp_path: Path) -> None:
    state = {"recent": deque([1.0, 2.0]), "own": PerRank(deque([torch.ones(2)]))}
    hpdcp.save(state, checkpoint_id=tmp_path)
    found = {"recent": deque(), "own": PerRank(deque())}
    hpdcp.load(found, checkpoint_id=tmp_path)
    assert found["recent"] == deque([1.0, 2.0])
    own = found["own"]
    assert isinstance(own, PerRank)
    assert torch.equal(own.value[0], torch.ones(2))


def test_the_result_of_a_collective_under_way_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting fills the memory here, as the collective would."""

    def arrive(tensor: AsyncCollectiveTensor) -> torch.Tensor:
        return tensor.elem.fill_(7)

    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", arrive)
    hpdcp.save({"w": AsyncCollectiveTensor(torch.zeros(3))}, checkpoint_id=tmp_path)
    found = torch.zeros(3)
    hpdcp.load({"w": found}, checkpoint_id=tmp_path)
    assert found.tolist() == [7, 7, 7]
    result = torch.zeros(3)
    hpdcp.load({"w": AsyncCollectiveTensor(result)}, checkpoint_id=tmp_path)
    assert result.tolist() == [7, 7, 7]
