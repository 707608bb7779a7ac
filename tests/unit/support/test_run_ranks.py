"""The helper that starts ranks: it fails when one of them does, and leaves nothing behind when time is up."""

from __future__ import annotations

import textwrap
from pathlib import Path

import psutil
import pytest

from tests.support.ranks import run_python, run_ranks


def _file(folder: Path, body: str) -> Path:
    path = folder / "ranked.py"
    path.write_text(
        "import os, pathlib, sys, time\n\ndef test_it():\n" + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return path


def test_every_rank_runs_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, "pathlib.Path(__file__).with_name('ran' + os.environ['RANK']).touch()")
    run_ranks(2, file)
    assert sorted(p.name for p in tmp_path.glob("ran*") if p != file) == ["ran0", "ran1"]


def test_one_failing_rank_fails_the_run_and_its_output_is_shown(tmp_path: Path) -> None:
    file = _file(tmp_path, "assert os.environ['RANK'] == '0', 'the odd one'")
    with pytest.raises(AssertionError, match="the odd one"):
        run_ranks(2, file)


def test_ranks_that_hang_are_killed_at_the_time_limit(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    file = _file(
        tmp_path,
        f"""
        with open({str(pids)!r}, "a") as out:
            out.write(str(os.getpid()) + "\\n")
        time.sleep(600)
        """,
    )
    with pytest.raises(AssertionError, match="ran longer than"):
        run_ranks(2, file, timeout=15)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    assert not [pid for pid in started if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_an_unexpected_exit_status_is_an_error() -> None:
    run_python(["-c", "raise SystemExit(3)"], expect=3)
    with pytest.raises(AssertionError, match="exited with 3, not 0"):
        run_python(["-c", "raise SystemExit(3)"])
