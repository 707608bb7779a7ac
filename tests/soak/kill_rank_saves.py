"""Kill one rank or all ranks of saves at random moments; afterwards exactly the old or the new step must load.

python -m tests.soak.kill_rank_saves FOLDER KILLS SEED
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import mmap
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hpdcp
from hpdcp._base.errors import HpdcpError
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
from tests.faults.forking import fork, wait

RANKS = 3
ROWS = 32
SOON = 15.0
"""Seconds after which a rank that survived another must be through."""


def state(rank: int, step: int) -> dict[str, object]:
    mine = torch.full((ROWS, 256), float(step))
    box = ChunkStorageMetadata((rank * ROWS, 0), (ROWS, 256))
    setattr(mine, CHUNK_INFO, ChunkInfo(box, (ROWS * RANKS, 256)))
    return {"w": mine, "shared": torch.full((8,), float(step)), "step": step, "rng": hpdcp.PerRank([rank, step])}


def loaded_step(folder: Path) -> int:
    """The step that the whole checkpoint is of; AssertionError for a mixture."""
    target: dict[str, object] = {"w": torch.zeros(ROWS * RANKS, 256), "shared": torch.zeros(8), "step": -1}
    hpdcp.load(target, checkpoint_id=folder)
    step = target["step"]
    assert isinstance(step, int)
    for name in ("w", "shared"):
        values = target[name].unique().tolist()  # type: ignore[attr-defined]
        assert values == [float(step)], f"{name} holds {values[:5]}, the step is {step}"
    return step


def save_forever(rank: int, meeting: Path, folder: Path, first: int, board: mmap.mmap) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # says where it waits
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(meeting), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    with contextlib.suppress(HpdcpError):
        for step in itertools.count(first):
            if rank == 0:
                board[:8] = step.to_bytes(8, "little")
            hpdcp.save(state(rank, step), checkpoint_id=folder)
            if rank == 0:
                board[8:16] = step.to_bytes(8, "little")
    os._exit(0)


def main(folder: Path, kills: int, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    board = mmap.mmap(-1, 16)
    target = folder / "checkpoint"
    step, slowest = 0, 0.0
    for number in range(kills):
        meeting = folder / f"meeting {number}"
        ranks = [fork(lambda rank=rank: save_forever(rank, meeting, target, step + 1, board)) for rank in range(RANKS)]  # type: ignore[misc]  # noqa: B023
        deadline = time.monotonic() + 60
        while int.from_bytes(board[8:16], "little") <= step:
            assert time.monotonic() < deadline, "no first save within 60 s"
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        victims = ranks if chance.random() < 0.3 else [chance.choice(ranks)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        for pid in ranks:
            wait_at_most(pid, SOON, f"seed {seed}, kill {number}")
        slowest = max(slowest, time.monotonic() - began)
        begun, done = (int.from_bytes(board[at : at + 8], "little") for at in (0, 8))
        step = loaded_step(target)
        assert done <= step <= begun, f"{step} loads; {done} was saved last, {begun} was being saved (seed {seed})"
        board[8:16] = step.to_bytes(8, "little")
        meeting.unlink(missing_ok=True)
    print(f"{kills} kills of ranks; the last survivor was through after {slowest:.1f} s at most")


def wait_at_most(pid: int, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            wait(pid)
            raise AssertionError(f"a rank that survived still waits after {seconds} s ({what})")
        time.sleep(0.005)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
