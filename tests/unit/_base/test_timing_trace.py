"""Trace files: events of every rank and thread, readable at any moment, and never a reason for a save to fail."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpdcp._base import timing
from hpdcp._base.timing import set_rank, stage
from tests.support.ranks import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "not yet" / "there"
    monkeypatch.setenv("HPDCP_TRACE", str(path))
    monkeypatch.delenv("RANK", raising=False)
    yield path
    close()
    set_rank(None)


def close() -> None:
    if timing._trace_file is not None:
        timing._trace_file.close()
    timing._forget_trace()


def events(path: Path) -> list[dict[str, Any]]:
    text = path.read_text().rstrip()
    found: list[dict[str, Any]] = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
    return found


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_stages_nest_as_begin_and_end_events_on_the_rank_s_track(folder: Path) -> None:
    set_rank(3)
    with stage("save"), stage("execute_write", {"bytes": 4096}):
        pass
    close()
    path = only_file(folder)
    assert path.name == f"trace_rank3_{os.getpid()}.json"
    found = json.loads(path.read_text())
    names = [event for event in found if event["ph"] == "M"]
    stages = [event for event in found if event["ph"] != "M"]
    assert {(e["name"], e["pid"], e["args"]["name"]) for e in names} == {
        ("process_name", 3, "rank 3"),
        ("thread_name", 3, threading.current_thread().name),
    }
    assert [(e["ph"], e["name"]) for e in stages] == [
        ("B", "save"), ("B", "execute_write"), ("E", "execute_write"), ("E", "save"),
    ]  # fmt: skip
    assert [e["ts"] for e in stages] == sorted(e["ts"] for e in stages)
    assert {(e["pid"], e["tid"]) for e in stages} == {(3, threading.get_native_id())}
    assert stages[1]["args"] == {"bytes": 4096}


def test_an_event_is_in_the_file_before_the_stage_goes_on(folder: Path) -> None:
    with stage("save"):
        assert [event["name"] for event in events(only_file(folder)) if event["ph"] == "B"] == ["save"]


def test_a_failed_stage_ends_with_the_error_s_class(folder: Path) -> None:
    with pytest.raises(ValueError, match="x"), stage("load"):
        raise ValueError("x")
    assert events(only_file(folder))[-1]["args"] == {"error": "ValueError"}


def test_threads_have_tracks_of_their_own_and_do_not_garble_the_file(folder: Path) -> None:
    together = threading.Barrier(4)

    def work() -> None:
        together.wait()
        for _ in range(50):
            with stage("execute_read"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close()
    found = json.loads(only_file(folder).read_text())
    for tid in {event["tid"] for event in found}:
        phases = [event["ph"] for event in found if event["tid"] == tid and event["ph"] != "M"]
        assert phases == ["B", "E"] * 50
    assert len({event["tid"] for event in found}) == 4


def test_a_killed_process_leaves_a_file_that_shows_where_it_was(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom hpdcp.timing import stage\nwith stage('save'):\n  os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"HPDCP_TRACE": str(tmp_path), "RANK": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    path = only_file(tmp_path)
    assert path.name.startswith("trace_rank1_")
    assert (events(path)[-1]["ph"], events(path)[-1]["name"]) == ("B", "save")


def test_a_process_that_ends_leaves_strict_json_and_a_forked_child_a_file_of_its_own(tmp_path: Path) -> None:
    code = """
import multiprocessing
from hpdcp._base.timing import stage

def work():
    with stage("child"):
        pass

with stage("parent"):
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
"""
    environment = os.environ | {"HPDCP_TRACE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
    stages = [{event["name"] for event in events(path) if event["ph"] != "M"} for path in tmp_path.iterdir()]
    assert sorted(stages, key=sorted) == [{"child"}, {"parent"}]
    assert sum(path.read_text().rstrip().endswith("]") for path in tmp_path.iterdir()) >= 1


def test_a_trace_that_cannot_be_written_warns_once_and_the_stages_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("HPDCP_TRACE", str(blocked))
    ran = 0
    with caplog.at_level(logging.WARNING, "hpdcp"):
        for _ in range(3):
            with stage("save"):
                ran += 1
    close()
    assert ran == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "HPDCP_TRACE" in caplog.text


def test_a_disk_that_fills_up_warns_once_and_the_stages_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode: real_open("/dev/full", os.O_WRONLY))
    monkeypatch.setenv("HPDCP_TRACE", "/tmp")
    with caplog.at_level(logging.WARNING, "hpdcp"), stage("save"), stage("inner"):
        pass
    close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text


def test_without_the_variable_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPDCP_TRACE", raising=False)
    with stage("save"):
        pass
    assert timing._trace_file is None
