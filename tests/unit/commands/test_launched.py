"""Who does the work of a command that is not shared: process 0 of torchrun's, and whoever runs it by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hpdcp

RANK_3 = {"TORCHELASTIC_RUN_ID": "a job", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    hpdcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step")
    return tmp_path / "step"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command with a rank's environment, started by this process, which has none: as torchrun does."""
    return subprocess.run(
        [sys.executable, "-m", "hpdcp", *arguments], env=os.environ | RANK_3, text=True, capture_output=True
    )


def run_from_a_rank(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command as a rank of a training job starts it."""
    script = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-m', 'hpdcp', *sys.argv[1:]]))"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=os.environ | RANK_3, text=True, capture_output=True
    )


def test_a_process_of_torchrun_s_leaves_it_to_process_0_and_says_so(checkpoint: Path) -> None:
    done = run("rm", checkpoint, "--yes")
    assert done.returncode == 0
    assert "process 3 of torchrun's leaves it to process 0" in done.stderr
    assert (checkpoint / ".metadata").exists()


def test_a_rank_that_starts_a_command_by_itself_has_it_done(checkpoint: Path) -> None:
    done = run_from_a_rank("rm", checkpoint, "--yes")
    assert done.returncode == 0, done.stderr
    assert "removed 3 files" in done.stdout
    assert not checkpoint.exists()
    missing = run_from_a_rank("rm", checkpoint, "--yes")
    assert missing.returncode == 3
    assert "step" in missing.stderr
