"""Bars of `save` and `load`: what they count, where they appear, and what never shows one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._base.errors import NotSupportedError
from tests.support.ranks import ROOT
from tests.unit._base.test_progress import Recorder, drawn

__all__ = ["drawn"]

_SAVE_AND_LOAD = """
import fcntl, os, struct, sys, termios, torch, hpdcp
state, folder = {"w": torch.ones(1 << 18), "n": 1}, sys.argv[1]

def save_and_load():
    hpdcp.save(state, checkpoint_id=folder)
    hpdcp.load(state, checkpoint_id=folder)
"""
_BARS = ["save", "load"]


def state() -> dict[str, object]:
    return {"w": torch.arange(1000.0), "slow": torch.ones(8, 8).t(), "words": ["a", "b"], "half": torch.ones(3).half()}


def test_save_and_load_count_every_byte_of_tensors_and_values(tmp_path: Path, drawn: list[Recorder]) -> None:
    with hpdcp.config.using(progress="always"):
        metadata = hpdcp.save(state(), checkpoint_id=tmp_path)
        into = {"w": torch.zeros(1000), "slow": torch.zeros(8, 8), "words": None, "half": torch.zeros(3).half()}
        hpdcp.load(into, checkpoint_id=tmp_path)
    assert [bar.label for bar in drawn] == _BARS
    stored = int(metadata.storage.length.sum())
    assert [bar.total for bar in drawn] == [stored, stored]
    # What was counted on the way, before a good end fills the bar.
    assert [bar.seen[-1] for bar in drawn] == [stored, stored]


def test_a_load_of_a_part_counts_that_part(tmp_path: Path, drawn: list[Recorder]) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)
    with hpdcp.config.using(progress="always"):
        hpdcp.load({"half": torch.zeros(3).half()}, checkpoint_id=tmp_path)
    assert [(bar.total, bar.seen[-1]) for bar in drawn] == [(6, 6)]


def test_without_collectives_there_is_a_bar_too(tmp_path: Path, drawn: list[Recorder]) -> None:
    with hpdcp.config.using(progress="always"):
        hpdcp.save(state(), checkpoint_id=tmp_path, use_collectives=False)
        hpdcp.load(state(), checkpoint_id=tmp_path, use_collectives=False)
    assert [bar.label for bar in drawn] == _BARS


def test_a_save_that_fails_leaves_no_bar_behind(tmp_path: Path, drawn: list[Recorder]) -> None:
    tmp_path.joinpath("file").touch()
    with hpdcp.config.using(progress="always"):
        with pytest.raises(hpdcp.errors.HpdcpError):
            hpdcp.save(state(), checkpoint_id=tmp_path / "file" / "below")
        hpdcp.save(state(), checkpoint_id=tmp_path / "fine")
    assert [bar.closed_at == bar.total for bar in drawn if bar.closed_at is not None] == [True]


def test_without_tqdm_a_save_and_a_load_fail_before_anything_is_written_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hpdcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "old")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    target = {"w": torch.zeros(3)}
    with hpdcp.config.using(progress="always"):
        with pytest.raises(NotSupportedError, match=r"hpdcp\[progress\]"):
            hpdcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "new")
        with pytest.raises(NotSupportedError, match=r"hpdcp\[progress\]"):
            hpdcp.load(target, checkpoint_id=tmp_path / "old")
    assert not (tmp_path / "new").exists()
    assert torch.equal(target["w"], torch.zeros(3))


def environment(progress: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HPDCP_PROGRESS": progress}


def script(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SAVE_AND_LOAD + code, str(folder)],
        env=environment("always"), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


def test_a_log_gets_lines_on_stderr_and_nothing_from_a_save_in_the_background(tmp_path: Path) -> None:
    background = "hpdcp.async_save(state, checkpoint_id=folder).get_result()"
    ran = script(f"save_and_load()\n{background}\nprint('done')", tmp_path / "c")
    assert ran.stdout == "done\n"
    lines = ran.stderr.splitlines()
    assert {line.split(":")[0] for line in lines} == set(_BARS), ran.stderr
    assert sum("100%" in line for line in lines) == 2


def test_a_script_whose_stderr_is_full_or_closed_saves_and_loads(tmp_path: Path) -> None:
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"
    closed = "os.close(2)"
    code = f"{full}\nsave_and_load()\n{closed}\nsave_and_load()\nsys.stderr = None\nsave_and_load()\nprint('done')"
    assert script(code, tmp_path / "c").stdout == "done\n"


def test_on_a_terminal_bars_appear_where_they_are_asked_for(tmp_path: Path) -> None:
    code = """
def of_width(columns):
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 30 if columns else 0, columns, 0, 0))

def on_all():
    for columns in (0, 70):
        of_width(columns)
        save_and_load()
        sys.stderr.write("|")

on_all()
with hpdcp.config.using(progress="never"):
    on_all()
"""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _SAVE_AND_LOAD + code, str(tmp_path / "c")], stderr=theirs, env=environment("auto")
    )
    os.close(theirs)
    seen = b""
    try:
        while True:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # nobody has the terminal any more
                break
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)
    asked = seen.decode().split("\r")
    assert sum("save: 100%" in text for text in asked) >= 2
    assert sum("load: 100%" in text for text in asked) >= 2
    # The last mark of those who asked, and two of those who did not, with nothing in between.
    assert seen.decode().endswith("|||"), seen
