"""Whoever is killed in the middle of a save in the background: a whole step loads, and nobody is left over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
import torch

import hpdcp
from tests.support.apart import started
from tests.support.ranks import forked_python
from tests.support.workers import wait_until, workers_of

HERE = Path(__file__).parent


def test_trainers_and_workers_killed_at_random_moments_leave_a_whole_step(tmp_path: Path) -> None:
    seed = 1 if os.environ.get("CI") else int.from_bytes(os.urandom(4), "little")
    output = forked_python(
        ["-W", "error", str(HERE / "async_kills.py"), str(tmp_path / "ckpt"), "3", str(seed)], timeout=110
    )
    print(seed, output)


@pytest.mark.parametrize("mode", ["gloo", "storage"])
def test_a_killed_trainer_fails_the_save_of_the_others_and_the_step_before_loads(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "ckpt"
    with started(2, HERE / "async_lost_trainer.py", str(folder), mode) as ranks:
        for rank in ranks:
            for _ in range(3):
                assert rank.readline().startswith("landed ")
        workers = [worker for rank in ranks for worker in workers_of(rank.pid)]
        assert len(workers) == 2
        time.sleep(0.05)
        ranks[1].kill()
        killed = time.time()
        rest = ranks[0].rest(60)
        last = rest.splitlines()[-1].split()
        assert last[0] == "lost", rest
        assert float(last[2]) - killed < 15
        wait_until(lambda: not any(map(_is_there, workers)), 10, "the workers of trainers that are gone have ended")
    target = {"w": torch.zeros(128, 16), "step": 0}
    hpdcp.load(target, checkpoint_id=folder)
    step = target["step"]
    # Rank 0 has heard of every step that was published, but for the last word that may have been on its way.
    assert step in (int(last[1]) - 1, int(last[1]))
    assert bool((target["w"] == step).all())


def _is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
