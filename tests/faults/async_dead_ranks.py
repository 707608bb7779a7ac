"""Three ranks save in the background; one fails, dies or passes something else, and the others must hear of it soon.

    python async_dead_ranks.py FOLDER CASE [VICTIM]

Prints after how many seconds the survivors knew. The mailbox's own timeout is ten minutes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hpdcp
from hpdcp._base.errors import HpdcpError, PeerLostError
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
from tests.faults.forking import fork, wait
from tests.support.workers import workers_of

RANKS = 3
ROWS = 8
SOON = 30.0
"""Seconds, the start of the workers on a busy machine among them."""


class Unsendable(hpdcp.StandardSavePlanner):
    """Holds what no other process can be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = signal.getsignal
        self.held = (line for line in ())

    def build_global_plan(self, plans):  # type: ignore[no-untyped-def]
        return super().build_global_plan(plans)


def state(rank: int, step: int) -> dict[str, object]:
    mine = torch.full((ROWS, 16), float(step))
    box = ChunkStorageMetadata((rank * ROWS, 0), (ROWS, 16))
    setattr(mine, CHUNK_INFO, ChunkInfo(box, (ROWS * RANKS, 16)))
    return {"w": mine, "step": step}


def save(rank: int, folder: Path, case: str, victim: int) -> hpdcp.AsyncSaveResponse:
    """The call that goes wrong."""
    mine = rank == victim
    planner = None
    if mine and case == "dies before its call":
        os.kill(os.getpid(), signal.SIGKILL)
    if mine and case == "passes another folder":
        folder = folder.with_name("elsewhere")
    if mine and case == "fails at the call":
        planner = Unsendable()
    if mine and case == "cannot prepare":
        # A file where the folder's parent should be, in this rank's worker only.
        os.environ["HPDCP_BACKEND"] = "none of these"
    if mine and case in ("dies after its call", "leaves the group and waits"):
        hpdcp.start_async_worker()
        workers_of()[0].send_signal(signal.SIGSTOP)
    response = hpdcp.async_save(state(rank, 2), checkpoint_id=folder, planner=planner)
    if mine and case == "dies after its call":
        os.kill(os.getpid(), signal.SIGKILL)
    if mine and case == "leaves the group and waits":
        worker = workers_of()[0]
        dist.destroy_process_group()
        time.sleep(9)
        worker.send_signal(signal.SIGCONT)
    return response


def run_rank(rank: int, port: int, folder: Path, case: str, victim: int, ending: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=300)
    )
    hpdcp.save(state(rank, 1), checkpoint_id=folder)
    began = time.monotonic()
    try:
        save(rank, folder, case, victim).get_result(120)
        how = "saved"
    except HpdcpError as error:
        how = f"{type(error).__name__}: {error}"
    ending.write_text(f"{time.monotonic() - began:.3f} {how}")
    while not all(ending.with_name(str(other)).exists() for other in range(RANKS) if other != victim):
        if time.monotonic() - began > 2 * SOON:
            break
        time.sleep(0.05)
    os._exit(0)


def main(root: Path, case: str, victim: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    endings = [root / str(rank) for rank in range(RANKS)]
    pids = [
        fork(lambda rank=rank: run_rank(rank, port, root / "ckpt", case, victim, endings[rank]))  # type: ignore[misc]
        for rank in range(RANKS)
    ]
    exits = [wait(pid) for pid in pids]
    texts = {rank: path.read_text() for rank, path in enumerate(endings) if path.exists()}
    print(case, victim, exits, texts)
    survivors = [rank for rank in range(RANKS) if rank != victim]
    target = {"w": torch.zeros(ROWS * RANKS, 16), "step": 0}
    if case == "leaves the group and waits":
        assert all(text.split()[1] == "saved" for text in texts.values()) and len(texts) == RANKS, texts
        hpdcp.load(target, checkpoint_id=root / "ckpt")
        assert target["step"] == 2
        return
    for rank in survivors:
        seconds, _, how = texts[rank].partition(" ")
        assert float(seconds) < SOON, texts
        assert how.startswith((PeerLostError.__name__, "InvalidArgumentError")), texts
        assert f"rank {victim}" in how or "rank 0" in how, texts
    hpdcp.load(target, checkpoint_id=root / "ckpt")
    assert target["step"] == 1 and bool((target["w"] == 1).all())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1)
