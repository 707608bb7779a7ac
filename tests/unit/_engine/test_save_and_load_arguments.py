"""The two verbs' signatures, and what they refuse at the door."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import FileSystemReader, FileSystemWriter
from hpdcp._base.errors import CheckpointNotFoundError, InvalidArgumentError
from tests.support.ranks import run_python


def _parameters(verb: Any) -> list[tuple[str, str, object]]:
    return [(name, p.kind.name, p.default) for name, p in inspect.signature(verb).parameters.items()]


def test_the_signatures_are_as_promised() -> None:
    empty = inspect.Parameter.empty
    assert _parameters(hpdcp.save) == [
        ("state_dict", "POSITIONAL_OR_KEYWORD", empty),
        ("checkpoint_id", "KEYWORD_ONLY", None),
        ("storage_writer", "KEYWORD_ONLY", None),
        ("planner", "KEYWORD_ONLY", None),
        ("no_dist", "KEYWORD_ONLY", False),
        ("use_collectives", "KEYWORD_ONLY", True),
    ]
    assert _parameters(hpdcp.load) == [
        ("state_dict", "POSITIONAL_OR_KEYWORD", empty),
        ("checkpoint_id", "KEYWORD_ONLY", None),
        ("storage_reader", "KEYWORD_ONLY", None),
        ("planner", "KEYWORD_ONLY", None),
        ("no_dist", "KEYWORD_ONLY", False),
        ("use_collectives", "KEYWORD_ONLY", True),
        ("broadcast_replicated_tensors", "KEYWORD_ONLY", None),
        ("broadcast_groups", "KEYWORD_ONLY", None),
        ("broadcast_batch_bytes", "KEYWORD_ONLY", 6 * 1024 * 1024),
    ]


def test_neither_a_place_nor_a_writer_or_reader_is_a_value_error_naming_both() -> None:
    with pytest.raises(ValueError, match=r"checkpoint_id=.*storage_writer="):
        hpdcp.save({})
    with pytest.raises(ValueError, match=r"checkpoint_id=.*storage_reader="):
        hpdcp.load({})
    with pytest.raises(InvalidArgumentError, match="checkpoint_id"):
        hpdcp.save({}, storage_writer=FileSystemWriter())
    with pytest.raises(InvalidArgumentError, match="checkpoint_id"):
        hpdcp.load({}, storage_reader=FileSystemReader())


@pytest.mark.parametrize("kind", [str, Path])
def test_a_checkpoint_id_is_a_string_or_a_path(tmp_path: Path, kind: type) -> None:
    place = kind(tmp_path / "step_1")
    assert hpdcp.save({"a": 1}, checkpoint_id=place).world_size == 1
    state = {"a": 0}
    assert hpdcp.load(state, checkpoint_id=place) is None
    assert state == {"a": 1}


def test_a_checkpoint_id_beside_a_writer_or_a_reader_goes_to_it(tmp_path: Path) -> None:
    writer, reader = FileSystemWriter(tmp_path / "first"), FileSystemReader(tmp_path / "first")
    hpdcp.save({"a": 1}, storage_writer=writer)
    hpdcp.save({"a": 2}, storage_writer=writer, checkpoint_id=tmp_path / "second")
    state = {"a": 0}
    hpdcp.load(state, storage_reader=reader)
    assert state == {"a": 1}
    hpdcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / "second")
    assert state == {"a": 2}


def test_one_writer_and_one_reader_serve_many_calls(tmp_path: Path) -> None:
    writer, reader, planner = FileSystemWriter(tmp_path), FileSystemReader(tmp_path), hpdcp.StandardLoadPlanner()
    for step in range(3):
        hpdcp.save({"step": step, "w": torch.full((2,), float(step))}, storage_writer=writer)
        state = {"step": -1, "w": torch.zeros(2)}
        hpdcp.load(state, storage_reader=reader, planner=planner)
        assert state["step"] == step
        assert state["w"].tolist() == [step, step]


@pytest.mark.parametrize("value", [-1, 1.5, True, "6 MiB"])
def test_a_batch_is_a_number_of_bytes(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="broadcast_batch_bytes"):
        hpdcp.load({}, checkpoint_id=tmp_path, broadcast_batch_bytes=value)


def test_groups_contradict_a_load_without_broadcasts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broadcast_groups"):
        hpdcp.load({}, checkpoint_id=tmp_path, broadcast_groups={}, broadcast_replicated_tensors=False)
    for alone in ({"no_dist": True}, {"use_collectives": False}):
        with pytest.raises(ValueError, match=next(iter(alone))):
            hpdcp.load({}, checkpoint_id=tmp_path, broadcast_replicated_tensors=True, **alone)
        with pytest.raises(ValueError, match=next(iter(alone))):
            hpdcp.load({}, checkpoint_id=tmp_path, broadcast_groups={}, **alone)


def test_nothing_there_is_a_file_not_found_error_that_names_the_place(tmp_path: Path) -> None:
    place = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError, match="nowhere") as caught:
        hpdcp.load({}, checkpoint_id=place)
    assert isinstance(caught.value, CheckpointNotFoundError)
    assert not place.exists()


def test_without_a_process_group_a_save_is_one_rank_with_global_metadata(tmp_path: Path) -> None:
    hpdcp.save({"a": 1}, checkpoint_id=tmp_path / "whole")
    assert (tmp_path / "whole" / ".metadata").exists()
    hpdcp.save({"a": 2}, checkpoint_id=tmp_path / "alone", no_dist=True)
    assert (tmp_path / "alone" / "0.metadata").exists()
    assert not (tmp_path / "alone" / ".metadata").exists()
    state = {"a": 0}
    hpdcp.load(state, checkpoint_id=tmp_path / "alone")
    assert state == {"a": 2}


def test_public_modules_are_there_without_being_imported_by_name() -> None:
    used = "hpdcp.errors.HpdcpError, hpdcp.utils.flatten_state_dict, hpdcp.ragged.from_local, hpdcp.config.using"
    run_python(["-c", f"import hpdcp; {used}"])
