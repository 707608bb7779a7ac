"""`hpdcp rm`: asks first, says what goes and what stays."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._files.commit import Attempt
from hpdcp_backends.local import LocalBackend
from tests.support.command import Command
from tests.support.data_files import without_attempt
from tests.support.ranks import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hpdcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step_3")
    return tmp_path / "step_3"


def test_what_would_go_is_listed_in_the_order_in_which_it_goes(folder: Path, command: Command) -> None:
    (folder / "notes.txt").write_text("mine")
    answer = command("rm", folder, "--dry-run")
    lines = [line.strip() for line in answer.out.splitlines()]
    assert without_attempt(lines[1:4]) == [".metadata", "_rank0_.safetensors", ".attempt"]
    assert "1 other file stays: notes.txt" in answer.said
    document = command("rm", folder, "--dry-run", "--json").document
    assert document["keys"] == lines[1:4]
    assert document["foreign"] == ["notes.txt"]
    assert document["dry_run"] is True
    assert len(list(folder.iterdir())) == 4


def test_yes_removes_it(folder: Path, command: Command) -> None:
    said = command("rm", folder, "--yes").said
    assert said.startswith("removed 3 files,")
    assert said.endswith(f", and the folder: {folder}")
    assert not folder.exists()
    assert "not there" in command("rm", folder, "--yes", status=3).err


def test_without_a_terminal_and_without_yes_nothing_goes(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        answer = command("rm", folder, status=2)
        assert answer.err.startswith("hpdcp: there is no terminal to ask on: give --yes")
        assert answer.err.count("\n") == 1
    assert (folder / ".metadata").exists()


@pytest.mark.parametrize(("answer", "status", "stays"), [("y", 0, False), ("n", 1, True), ("", 1, True)])
def test_on_a_terminal_it_asks(answer: str, status: int, stays: bool, folder: Path) -> None:
    ours, theirs = pty.openpty()
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    process = subprocess.Popen(
        [sys.executable, "-m", "hpdcp", "rm", str(folder), "--json"],
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        os.write(ours, f"{answer}\n".encode())
        out, err = process.communicate()
    finally:
        timer.cancel()
        os.close(ours)
        os.close(theirs)
    assert process.returncode == status, err
    assert f"Remove the checkpoint in {folder}: 3 files" in err
    assert folder.exists() == stays
    assert ('"dry_run": true' in out) == stays


def test_a_save_in_progress_needs_force(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "step"
    Attempt.begin(LocalBackend(str(folder)), "00000000deadbeef")
    assert "may be in progress" in command("rm", folder, "--yes", status=3).err
    assert "what a save that did not finish left" in command("rm", folder, "--force", "--dry-run").said
    command("rm", folder, "--yes", "--force")
    assert not folder.exists()


def test_errors_that_advise_a_removal_name_the_command(folder: Path) -> None:
    with pytest.raises(hpdcp.errors.CheckpointExistsError, match=f"hpdcp rm {folder}"):
        hpdcp.save({"w": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
