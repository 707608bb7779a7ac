"""Three ranks save in the background and one of them ends; the others must hear of it long before any timeout.

    python async_dead_ranks.py FOLDER MODE CASE VICTIM [SEED]

Prints what became of each survivor, and after how many seconds. The timeouts of hpdcp and of the process group are ten
minutes. The ranks are forked from this process, and not torchrun's, which would end the others when one dies.
"""

from __future__ import annotations

import os
import random
import signal
import socket
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
from tests.support.workers import workers_of

RANKS = 3
ROWS = 8
LONG = 600.0
WAIT = 90.0
"""Seconds that a rank waits for its result before that counts as waiting for ever."""
CASES = {
    "trainer before its call": "its training process died",
    "trainer right after its call": "its training process died",
    "trainer at some moment": "its training process died",
    "worker at some moment": "worker",
    "leaves the group and is late": "",
}
"""What ends on the victim, and what the others are told of it."""
NO_STORE = "The process that holds it, rank 0 or torchrun, died"
"""What they are told instead where rank 0, which holds the store, is dead when they call."""


def state(rank: int, step: int) -> dict[str, object]:
    mine = torch.full((ROWS, 16), float(step))
    box = ChunkStorageMetadata((rank * ROWS, 0), (ROWS, 16))
    setattr(mine, CHUNK_INFO, ChunkInfo(box, (ROWS * RANKS, 16)))
    return {"w": mine, "step": step, "rng": hpdcp.PerRank([rank, step])}


def run_rank(rank: int, mode: str, case: str, victim: int, moment: float, folder: Path, said: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LONG),
    )
    mine = rank == victim
    hpdcp.save(state(rank, 1), checkpoint_id=folder)
    if case.endswith("some moment"):
        # Workers that are there, and have met, get to every stage within milliseconds.
        first = hpdcp.async_save(state(rank, 1), checkpoint_id=folder, use_gloo=mode == "gloo")
        first.get_result(WAIT)
        dist.barrier()
    if mine and case == "trainer before its call":
        os.kill(os.getpid(), signal.SIGKILL)
    if mine and case == "leaves the group and is late":
        hpdcp.start_async_worker()
        workers_of()[0].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        response = hpdcp.async_save(state(rank, 2), checkpoint_id=folder, use_gloo=mode == "gloo")
        if mine:
            end(case, moment)
        response.get_result(WAIT)
        how = "saved"
    except HpdcpError as error:
        how = f"{type(error).__name__}: {error}"
    (said / str(rank)).write_text(f"{time.monotonic() - began:.1f} s, {how}")
    alive = [other for other in range(RANKS) if other != victim or not case.startswith("trainer")]
    while not all((said / str(other)).exists() for other in alive) and time.monotonic() - began < WAIT:
        time.sleep(0.05)
    os._exit(0)


def end(case: str, moment: float) -> None:
    """What happens to the victim after its call has returned."""
    if case == "trainer right after its call":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "leaves the group and is late":
        dist.destroy_process_group()
        time.sleep(8)
        workers_of()[0].send_signal(signal.SIGCONT)
        return
    time.sleep(moment)
    if case == "trainer at some moment":
        os.kill(os.getpid(), signal.SIGKILL)
    for worker in workers_of():
        worker.kill()


def main(root: Path, mode: str, case: str, victim: int, seed: int) -> None:
    moment = random.Random(seed).uniform(0, 0.1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        os.environ["HPDCP_MAILBOX_TIMEOUT"] = os.environ["HPDCP_GROUP_TIMEOUT"] = str(LONG)
    said, folder = root / "said", root / "checkpoint"
    said.mkdir(parents=True)
    ranks = [
        fork(lambda rank=rank: run_rank(rank, mode, case, victim, moment, folder, said))  # type: ignore[misc]
        for rank in range(RANKS)
    ]
    killed = case.startswith("trainer")
    assert [wait(pid) for pid in ranks] == [
        -signal.SIGKILL if killed and rank == victim else 0 for rank in range(RANKS)
    ]
    told = {int(path.name): path.read_text() for path in said.iterdir()}
    print(f"{mode}, {case}, rank {victim}: {told}", flush=True)
    assert sorted(told) == [rank for rank in range(RANKS) if not (killed and rank == victim)]
    check(case, victim, {rank: text.partition(" s, ")[2] for rank, text in told.items()}, folder)


def check(case: str, victim: int, told: dict[int, str], folder: Path) -> None:
    target = {"w": torch.zeros(ROWS * RANKS, 16), "step": 0}
    hpdcp.load(target, checkpoint_id=folder)
    step = target["step"]
    assert bool((target["w"] == step).all()), target
    saved = [rank for rank, how in told.items() if how == "saved"]
    if case == "leaves the group and is late":
        assert step == 2 and len(saved) == RANKS, told
        return
    if step == 2:
        # It was over before: who looks finds it published.
        assert case.endswith("some moment"), told
        return
    assert step == 1 and not saved, told
    for rank, how in told.items():
        if rank != victim:
            assert (
                how.startswith("PeerLostError: ")
                and f"rank {victim}" in how
                and (CASES[case] in how or NO_STORE in how)
            ), told
        else:
            assert how.startswith("WorkerDiedError: "), told


if __name__ == "__main__":
    root, mode, case, victim, *seed = sys.argv[1:]
    main(Path(root), mode, case, int(victim), int(seed[0]) if seed else 0)
