"""One of three ranks that save in the background; rank 1 is killed, and the others must not hang or publish.

python async_lost_trainer.py FOLDER MODE
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hpdcp
from hpdcp._base import config
from hpdcp._base.errors import PeerLostError
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata

ROWS = 64


def state(rank: int, world_size: int, step: int) -> dict[str, object]:
    mine = torch.full((ROWS, 16), float(step))
    box = ChunkStorageMetadata((rank * ROWS, 0), (ROWS, 16))
    setattr(mine, CHUNK_INFO, ChunkInfo(box, (ROWS * world_size, 16)))
    return {"w": mine, "step": step, "rng": hpdcp.PerRank([rank, step])}


def main(folder: Path, mode: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    step = 0
    with config.using(mailbox_timeout=3.0):
        while True:
            step += 1
            response = hpdcp.async_save(state(rank, world_size, step), checkpoint_id=folder, use_gloo=mode == "gloo")
            try:
                response.get_result(60)
            except PeerLostError:
                print(f"lost {step} {time.time()}", flush=True)
                # Training on needs the rank that is gone; what a script can do is to end.
                os._exit(0)
            print(f"landed {step}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
