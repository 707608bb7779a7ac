"""Variables that change in the trainer while its worker lives, as renewed credentials do, reach the worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._background._environment import CallEnvironment
from tests.support.workers import workers_of


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
