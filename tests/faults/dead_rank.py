"""One of several ranks that save over a checkpoint; the victim is killed in the middle of it.

    python dead_rank.py FOLDER VICTIM MOMENT      with the environment of torchrun

MOMENT: `plan` before the victim sends its plan, `write` when it has written half of its files, `publish` when the
coordinator has everything and is about to publish. Prints the class of the error that the save ended with.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

import hpdcp
from hpdcp.errors import HpdcpError
from hpdcp.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
from hpdcp.planner import SavePlan
from hpdcp_backends.local import LocalBackend

ROWS = 64


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
    offset = (rank * ROWS, 0)
    info = ChunkInfo(ChunkStorageMetadata(offset, (ROWS, 16)), (ROWS * dist.get_world_size(), 16))
    setattr(mine, CHUNK_INFO, info)
    return {"w": mine, "shared": torch.full((8,), float(step)), "step": step, "rng": hpdcp.PerRank([rank, step])}


def main(folder: str, victim: int, moment: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    hpdcp.save(state(rank, 1), checkpoint_id=folder)
    planner = die_at(moment) if rank == victim else None
    print("ready", flush=True)
    try:
        hpdcp.save(state(rank, 2), checkpoint_id=folder, planner=planner)
        print("saved", flush=True)
    except HpdcpError as error:
        print(type(error).__name__, str(error).replace("\n", " "), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
