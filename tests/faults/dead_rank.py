"""Kill one of several ranks in the middle of a save over a checkpoint; the others must raise soon.

    python dead_rank.py FOLDER

The victim dies before it sends its plan, when it has written half of its files, or, as the coordinator, when it has
everything and is about to publish. The ranks are forked from one process, and not torchrun's, which would end the
others when one dies.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hpdcp
from hpdcp._base.errors import HpdcpError
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
from hpdcp._plan.save_plan import SavePlan
from hpdcp_backends.local import LocalBackend
from tests.faults.forking import fork, wait

RANKS = 4
ROWS = 64
SOON = 30.0
"""Seconds in which every surviving rank must have raised; the process group's own timeout is twice that."""
CASES = (("write", 2), ("plan", 3), ("publish", 0))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingPlanner(hpdcp.StandardSavePlanner):
    def build_local_plan(self) -> SavePlan:
        die()
        raise AssertionError("unreachable")


def die_at(moment: str) -> hpdcp.StandardSavePlanner | None:
    """Arrange for this process's end at that moment of its next save."""
    if moment == "plan":
        return DyingPlanner()
    write, publish = LocalBackend.write, LocalBackend.publish

    def write_half(self: LocalBackend, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        def half() -> Iterable[memoryview]:
            for number, buffer in enumerate(buffers):
                if number == 1:
                    die()
                yield buffer

        write(self, key, half(), size=size, exclusive=exclusive)

    def publish_not(self: LocalBackend, key: str, data: bytes) -> None:
        if key == ".metadata":
            die()
        publish(self, key, data)

    if moment == "write":
        LocalBackend.write = write_half  # type: ignore[method-assign]
    else:
        LocalBackend.publish = publish_not  # type: ignore[method-assign]
    return None


def state(rank: int, step: int) -> dict[str, object]:
    mine = torch.full((ROWS, 16), float(step))
    box = ChunkStorageMetadata((rank * ROWS, 0), (ROWS, 16))
    setattr(mine, CHUNK_INFO, ChunkInfo(box, (ROWS * RANKS, 16)))
    return {"w": mine, "shared": torch.full((8,), float(step)), "step": step, "rng": hpdcp.PerRank([rank, step])}


def run_rank(rank: int, port: int, folder: Path, moment: str, victim: int, ending: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=2 * SOON),
    )
    hpdcp.save(state(rank, 1), checkpoint_id=folder)
    planner = die_at(moment) if rank == victim else None
    began = time.monotonic()
    try:
        hpdcp.save(state(rank, 2), checkpoint_id=folder, planner=planner)
        ending.write_text("saved")
    except HpdcpError as error:
        ending.write_text(f"{type(error).__name__} after {time.monotonic() - began:.3f}")
    # As a training script would: without taking leave of the others.
    os._exit(0)


def check(root: Path, moment: str, victim: int) -> float:
    """Run the ranks, and return the seconds after which the last of them had raised."""
    folder = root / moment
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    endings = [root / f"{moment} {rank}" for rank in range(RANKS)]
    ranks = [
        fork(lambda rank=rank: run_rank(rank, port, folder, moment, victim, endings[rank]))  # type: ignore[misc]
        for rank in range(RANKS)
    ]
    assert [wait(pid) for pid in ranks] == [-signal.SIGKILL if rank == victim else 0 for rank in range(RANKS)]
    texts = [path.read_text() for rank, path in enumerate(endings) if rank != victim]
    assert all(text.startswith("PeerLostError after ") for text in texts), texts
    slowest = max(float(text.rpartition(" ")[2]) for text in texts)
    assert slowest < SOON, texts
    target = {"w": torch.zeros(ROWS * RANKS, 16), "shared": torch.zeros(8), "step": 0}
    hpdcp.load(target, checkpoint_id=folder)
    assert target["step"] == 1
    assert bool((target["w"] == 1).all()) and bool((target["shared"] == 1).all())
    hpdcp.save(target, checkpoint_id=folder)
    return slowest


if __name__ == "__main__":
    for moment, victim in CASES:
        print(f"{moment}: rank {victim} died, the others knew after {check(Path(sys.argv[1]), moment, victim):.1f} s")
