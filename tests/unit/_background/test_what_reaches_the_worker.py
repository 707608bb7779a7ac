"""A call's writer, planner, configuration and variables hold in the worker, however long that has lived."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import FileSystemWriter, StandardSavePlanner
from hpdcp._background._environment import CallEnvironment
from hpdcp._background._specs import WriterSpec
from hpdcp._base import config
from hpdcp._base.config import BackendSettings, Route
from hpdcp._files.save_identity import SaveIdentity
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.planner import PlannerContext
from tests.support.small_saves import SOON, check, state
from tests.support.workers import workers_of


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    PLANS.clear()
    yield
    assert hpdcp.wait_for_saves(SOON)


def test_a_planner_that_changes_only_its_own_ranks_plan_need_not_go_to_the_worker(tmp_path: Path) -> None:
    class WithoutN(StandardSavePlanner):
        def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
            super().configure_planner({key: value for key, value in state_dict.items() if key != "n"}, context)

    metadata = hpdcp.async_save(state(), checkpoint_id=tmp_path, planner=WithoutN()).get_result(SOON)
    assert list(metadata.state_dict_metadata) == ["w"]


def test_a_writer_arrives_with_its_arguments(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "a", backend="local", layout="safetensors")
    hpdcp.async_save(state(), storage_writer=writer).get_result(SOON)
    check(tmp_path / "a", 1.0)
    hpdcp.async_save(state(2.0), storage_writer=writer, checkpoint_id=tmp_path / "b").get_result(SOON)
    check(tmp_path / "b", 2.0)


@pytest.mark.parametrize("options", [{"a": (1, 2)}, {"a": {1: "b"}}, {"a": b"bytes"}, {"a": [1, None, {"b": 2.5}]}])
def test_options_of_a_writer_arrive_as_they_are(options: dict[str, object], tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path, storage_options=options)
    identity = SaveIdentity("0" * 16, "run", 1)
    opened = WriterSpec.of(writer).open(identity)
    assert isinstance(opened, FileSystemWriter)
    assert opened.arguments() == writer.arguments()
    assert opened.identity == identity


def test_the_configuration_of_the_call_holds_in_the_worker(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "routes": [Route(str(tmp_path), "local", BackendSettings({"read_threads": 2}))],
        "backends": {"local": BackendSettings({"write_threads": 0})},
        "keep_replaced_for": 1000.0,
    }
    hpdcp.async_save(state(), checkpoint_id=tmp_path).get_result(SOON)
    before = {path.name for path in tmp_path.glob("_rank*")}
    with config.using(**settings):
        response = hpdcp.async_save(state(2.0), checkpoint_id=tmp_path)
    response.get_result(SOON)
    assert before < {path.name for path in tmp_path.glob("_rank*")}
    hpdcp.async_save(state(3.0), checkpoint_id=tmp_path).get_result(SOON)
    check(tmp_path, 3.0)
    assert len(list(tmp_path.glob("_rank*"))) == len(before)


def test_the_worker_takes_what_changed_and_keeps_what_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PYTHONPATH": "own", "CUDA_VISIBLE_DEVICES": "", "OLD_TOKEN": "1", "TOKEN": "old"}.items():
        monkeypatch.setenv(name, value)
    kept = {name: value for name, value in os.environ.items() if name not in ("OLD_TOKEN", "TOKEN", "PYTHONPATH")}
    monkeypatch.setattr(os, "environ", os.environ.copy())
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    variables = {**kept, "PYTHONPATH": "theirs", "CUDA_VISIBLE_DEVICES": "0,1", "TOKEN": "new"}
    CallEnvironment(b"", variables, ["/added", *sys.path]).apply()
    assert os.environ["TOKEN"] == "new"
    assert "OLD_TOKEN" not in os.environ
    assert os.environ["PYTHONPATH"] == "own"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert sys.path == [*before, "/added"]


def test_a_variable_set_after_the_first_save_holds_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(4)}
    hpdcp.async_save(state, checkpoint_id=tmp_path / "1").get_result(60)
    worker = workers_of()
    monkeypatch.setenv("HPDCP_TRACE", str(tmp_path / "traces"))
    hpdcp.async_save(state, checkpoint_id=tmp_path / "2").get_result(60)
    assert [process.pid for process in workers_of()] == [process.pid for process in worker]
    assert any("execute_write" in path.read_text() for path in (tmp_path / "traces").iterdir())


def test_new_files_have_the_permissions_that_the_caller_s_umask_leaves_at_each_call(tmp_path: Path) -> None:
    for umask in (0o077, 0o022):
        before = os.umask(umask)
        try:
            hpdcp.async_save(state(), checkpoint_id=tmp_path / str(umask)).get_result(SOON)
        finally:
            os.umask(before)
        files = [path for path in (tmp_path / str(umask)).iterdir() if path.is_file()]
        assert files and all(path.stat().st_mode & umask == 0 for path in files)
        assert (tmp_path / str(umask)).stat().st_mode & 0o777 == 0o777 & ~umask
