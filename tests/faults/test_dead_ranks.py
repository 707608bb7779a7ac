"""Ranks that die or are interrupted at some message: a few of the ends that `tests/soak` tries by the hour."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.ranks import forked_python

PROGRAM = Path(__file__).parents[1] / "soak" / "dead_ranks.py"


def test_the_others_raise_within_seconds_wherever_a_rank_ends(tmp_path: Path) -> None:
    seed = 1 if os.environ.get("CI") else int.from_bytes(os.urandom(4), "little")
    program = ["-W", "error", str(PROGRAM), str(tmp_path), "--kills", "10", "--seconds", "100", "--seed", str(seed)]
    environment = {"OPENBLAS_NUM_THREADS": "1"}
    print(forked_python(program, timeout=115, environment=environment))
