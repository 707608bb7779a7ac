"""A rank killed in the middle of a save: the others raise soon, nothing is published, the old checkpoint loads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hpdcp
from tests.support.ranks import ROOT

PROGRAM = Path(__file__).with_name("dead_rank.py")
RANKS = 4
SOON = 30.0
"""Seconds in which every surviving rank must have raised; the process group's own timeout is twice that."""


def start_ranks(folder: Path, victim: int, moment: str) -> list[subprocess.Popen[str]]:
    """Ranks of their own, not torchrun's, which would end the others when one dies."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(victim), moment],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]


@pytest.mark.parametrize(("victim", "moment"), [(2, "write"), (3, "plan"), (0, "publish")])
def test_the_other_ranks_raise_soon_and_the_old_checkpoint_loads(tmp_path: Path, victim: int, moment: str) -> None:
    ranks = start_ranks(tmp_path / "ckpt", victim, moment)
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        killed = time.monotonic()
        endings = []
        for number, rank in enumerate(ranks):
            output, _ = rank.communicate(timeout=max(0.1, SOON - (time.monotonic() - killed)))
            if number == victim:
                assert rank.returncode == -signal.SIGKILL
            else:
                endings.append(output)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [ending.split()[0] for ending in endings] == ["PeerLostError"] * (RANKS - 1), endings
    loads_step_one(tmp_path / "ckpt")


def loads_step_one(folder: Path) -> None:
    target = {"w": torch.zeros(64 * RANKS, 16), "shared": torch.zeros(8), "step": 0}
    hpdcp.load(target, checkpoint_id=folder)
    assert target["step"] == 1
    assert bool((target["w"] == 1).all()) and bool((target["shared"] == 1).all())
    hpdcp.save(target, checkpoint_id=folder)
