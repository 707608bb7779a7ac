"""A short slice of `tests/soak/hostile_inputs.py`, with a seed of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_inputs_are_read_or_refused_in_bounded_memory_and_time(seed: int) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.soak.hostile_inputs", "--inputs", "150", "--seed", str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "0 findings" in run.stdout
