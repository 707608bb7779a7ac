"""Ranks of a background save that die or are late: some of the ends at random, with either way to coordinate."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.async_dead_ranks import CASES, RANKS
from tests.support.ranks import forked_python

PROGRAM = Path(__file__).with_name("async_dead_ranks.py")


@pytest.mark.parametrize("case", CASES)
def test_the_others_hear_of_a_rank_that_ends_and_wait_for_one_that_is_late(tmp_path: Path, case: str) -> None:
    seed = 1 if os.environ.get("CI") else int.from_bytes(os.urandom(4), "little")
    chance = random.Random(f"{seed} {case}")
    mode, victim = chance.choice(["gloo", "storage"]), chance.randrange(RANKS)
    program = ["-W", "error", str(PROGRAM), str(tmp_path), mode, case, str(victim), str(seed)]
    print(seed, forked_python(program, timeout=115, environment={"OPENBLAS_NUM_THREADS": "1"}))
