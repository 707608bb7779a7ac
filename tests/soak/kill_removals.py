"""Kill removals of a checkpoint at random moments; afterwards it loads whole or is not there, and the next save works.

python -m tests.soak.kill_removals FOLDER KILLS SEED
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import hpdcp
from hpdcp._base.errors import CheckpointNotFoundError, IncompleteCheckpointError
from hpdcp.remove import remove_checkpoint
from tests.faults.forking import fork, loaded_step, state, wait


def main(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    beside = folder / "notes.txt"
    hpdcp.save(state(0), checkpoint_id=folder)
    began = time.monotonic()
    remove_checkpoint(folder)
    longest = 2 * (time.monotonic() - began)
    gone = 0
    for step in range(kills):
        hpdcp.save(state(step), checkpoint_id=folder)
        beside.write_text("a user's own")
        pid = fork(lambda: remove_checkpoint(folder) and None)
        time.sleep(chance.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        wait(pid)
        assert beside.read_text() == "a user's own"
        try:
            assert loaded_step(folder) == step
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            gone += 1
    print(f"{kills} kills of removals, after {gone} of which nothing loaded")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
