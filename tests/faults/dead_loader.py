"""One of several ranks that load; the victim is killed, or stopped, while tensors are broadcast.

    python dead_loader.py FOLDER VICTIM MOMENT      with the environment of torchrun

MOMENT: `read` when the victim reads what others wait for, `receive` when it has received some and others have not,
`stop` as `read`, but it stays there and does nothing more. Prints the class of the error that the load ended with.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import hpdcp
from hpdcp._base import config
from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import HpdcpError
from hpdcp._plan.load_plan import ReadItem
from hpdcp_backends.local import LocalBackend

COUNT = 24


class DyingPlanner(hpdcp.StandardLoadPlanner):
    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        if item.dest_index.fqn == "w12":
            os.kill(os.getpid(), signal.SIGKILL)


def end_while_reading(how: signal.Signals) -> None:
    read_ranges = LocalBackend.read_ranges

    def read_no_more(self: LocalBackend, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        if any(range_.offset for range_ in ranges):
            os.kill(os.getpid(), how)
        read_ranges(self, key, ranges, into)

    LocalBackend.read_ranges = read_no_more  # type: ignore[method-assign]


def state(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2))
    kinds = ([Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Replicate()])
    rows = (8, 4, 4)
    return {
        f"w{number:02d}": DTensor.from_local(
            torch.full((rows[number % 3], 64), value), mesh, kinds[number % 3], run_check=False
        )
        for number in range(COUNT)
    }


def main(folder: str, victim: int, moment: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=8 if moment == "stop" else 60))
    rank = dist.get_rank()
    hpdcp.save(state(1.0), checkpoint_id=folder)
    targets = state(-1.0)
    planner = None
    if rank == victim and moment == "receive":
        planner = DyingPlanner()
    elif rank == victim:
        end_while_reading(signal.SIGSTOP if moment == "stop" else signal.SIGKILL)
    print("ready", flush=True)
    try:
        with config.using(group_timeout=2):
            hpdcp.load(
                targets,
                checkpoint_id=folder,
                planner=planner,
                broadcast_replicated_tensors=True,
                broadcast_batch_bytes=0,
            )
        print("loaded", flush=True)
    except HpdcpError as error:
        print(type(error).__name__, str(error).replace("\n", " "), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
