"""Commands beside the tests: last, side by side with the others, and never longer than the session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.ranks import ROOT, run_python
from tests.support.workers import wait_until

_FEW_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _session(folder: Path, *tests: str) -> list[str]:
    """Arguments that run these tests in a session of their own, with nothing but the plugin."""
    file = folder / "test_it.py"
    file.write_text("\n".join(["import os, pathlib, pytest, time", *tests]))
    return ["-m", "pytest", "-v", "-p", "tests.support.background", f"--rootdir={folder}", "-c", os.devnull, str(file)]


def _run(session: list[str], expect: int = 0) -> str:
    return run_python(session, timeout=60, environment=_FEW_PLUGINS, expect=expect)


def _in_background(name: str, script: str, timeout: float = 60) -> str:
    return (
        f"@pytest.mark.in_background('sh', '-c', {script!r}, timeout={timeout})\n"
        f"def test_{name}(background):\n    assert 'well' in background.output()\n"
    )


def test_they_run_one_after_the_other_beside_the_other_tests_and_are_asked_last(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    beside = (
        f"def test_beside():\n    pathlib.Path({str(first)!r}).touch()\n"
        f"    while not pathlib.Path({str(second)!r}).exists(): time.sleep(0.02)\n"
    )
    one = f"until [ -e {first} ]; do sleep 0.02; done; [ ! -e {second} ] && echo well"
    two = f"touch {second}; echo well"
    output = _run(_session(tmp_path, _in_background("one", one), _in_background("two", two), beside))
    lines = [line.split("::")[1].split()[0] for line in output.splitlines() if "::" in line]
    assert lines == ["test_beside", "test_one", "test_two"]
    assert "3 passed" in output


@pytest.mark.parametrize(
    ("script", "timeout", "said"),
    [
        ("echo alas; exit 7", 60, "exited with 7; it ended with:"),
        ("echo alas; exec sleep 60", 1, "ran longer than 1 s"),
    ],
    ids=["fails", "hangs"],
)
def test_one_that_does_not_end_well_fails_its_test_and_is_shown(
    tmp_path: Path, script: str, timeout: float, said: str
) -> None:
    output = _run(_session(tmp_path, _in_background("one", script, timeout)), expect=1)
    assert said in output
    assert "alas" in output


def test_a_session_that_stops_early_ends_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    fails = (
        f"def test_fails():\n    while not pathlib.Path({str(pid)!r}).exists(): time.sleep(0.02)\n    assert False\n"
    )
    script = f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60"
    _run([*_session(tmp_path, _in_background("one", script), fails), "-x"], expect=1)
    assert not psutil.pid_exists(int(pid.read_text()))


def test_it_ends_when_pytest_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60"
    session = subprocess.Popen(
        [sys.executable, *_session(tmp_path, _in_background("one", script))],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | _FEW_PLUGINS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(pid.exists, 30, "the command has started")
    finally:
        session.kill()
        session.wait()
    started = int(pid.read_text())

    def gone() -> bool:
        return not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE

    wait_until(gone, 30, "the command has ended")
