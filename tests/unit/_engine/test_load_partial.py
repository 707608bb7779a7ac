"""A partial load fills what is stored and reports the rest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, StandardLoadPlanner
from hpdcp._base.errors import ShapeMismatchError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    hpdcp.save(
        {"a": torch.ones(3), "n": {"b": torch.ones(2, 2), "lr": 0.5}, "conf": {"x": [1]}}, checkpoint_id=tmp_path
    )
    return tmp_path


def test_what_is_stored_is_loaded_and_the_rest_is_listed(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    state: dict[str, Any] = {
        "a": torch.zeros(3),
        "n": {"b": torch.zeros(2, 2), "lr": 0.0, "new": torch.zeros(2)},
        "conf": {"x": None},
        "extra": "as it was",
    }
    planner = StandardLoadPlanner(allow_partial_load=True)
    with caplog.at_level(logging.WARNING, logger="hpdcp"):
        hpdcp.load(state, checkpoint_id=checkpoint, planner=planner)
    assert state["a"].tolist() == [1, 1, 1]
    assert state["n"]["b"].tolist() == [[1, 1], [1, 1]]
    assert state["n"]["lr"] == 0.5
    assert state["conf"] == {"x": [1]}
    assert state["n"]["new"].tolist() == [0, 0]
    assert state["extra"] == "as it was"
    assert planner.not_loaded == ("n.new", "extra")
    assert sum("partial load: 2 keys stay as they are" in record.message for record in caplog.records) == 1


def test_nothing_is_reported_where_everything_is_there(checkpoint: Path) -> None:
    planner = StandardLoadPlanner(allow_partial_load=True)
    hpdcp.load({"nothing": 1}, checkpoint_id=checkpoint, planner=planner)
    assert planner.not_loaded
    hpdcp.load({"a": torch.zeros(3)}, checkpoint_id=checkpoint, planner=planner)
    assert planner.not_loaded == ()


def test_a_shape_that_differs_is_an_error_all_the_same(checkpoint: Path) -> None:
    with pytest.raises(ShapeMismatchError, match=r"'a' \(stored \[3\], wanted \[4\]\)"):
        hpdcp.load(
            {"a": torch.zeros(4)}, checkpoint_id=checkpoint, planner=StandardLoadPlanner(allow_partial_load=True)
        )


def test_a_part_of_a_stored_value_that_is_not_there_stays_as_it_is(checkpoint: Path) -> None:
    planner = StandardLoadPlanner(allow_partial_load=True)
    state: dict[str, Any] = {"conf": {"x": [0], "y": "kept", "t": torch.full((1,), -7.0)}}
    hpdcp.load(state, checkpoint_id=checkpoint, planner=planner)
    assert state["conf"]["x"] == [1]
    assert state["conf"]["y"] == "kept"
    assert state["conf"]["t"].tolist() == [-7]
    assert set(planner.not_loaded) == {"conf.y", "conf.t"}


def test_rows_that_only_this_process_saved_fill_what_they_cover(tmp_path: Path) -> None:
    # One of two ranks saved, without collectives; the other's rows do not exist.
    whole = torch.arange(8.0).reshape(4, 2)
    rows = whole[:2].clone()
    setattr(rows, CHUNK_INFO, ChunkInfo(ChunkStorageMetadata((0, 0), (2, 2)), (2, 2)))
    hpdcp.save({"w": rows, "b": torch.ones(1)}, checkpoint_id=tmp_path)
    target = torch.zeros(2, 2)
    hpdcp.load({"w": target}, checkpoint_id=tmp_path)
    assert torch.equal(target, whole[:2])
