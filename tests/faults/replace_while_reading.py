"""Load again and again while another process replaces the checkpoint: one step each time, or word that it was replaced.

python replace_while_reading.py FOLDER LOADS
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import hpdcp
from hpdcp._base.errors import CheckpointReplacedError
from tests.faults.forking import fork, loaded_step, state, wait


def main(folder: Path, loads: int) -> None:
    hpdcp.save(state(0), checkpoint_id=folder)

    def save_forever() -> None:
        for step in itertools.count(1):
            hpdcp.save(state(step), checkpoint_id=folder)

    writer = fork(save_forever)
    try:
        seen, replaced = read_often(folder, loads)
    finally:
        os.kill(writer, signal.SIGKILL)
        assert wait(writer) == -signal.SIGKILL
    assert sorted(seen) == seen, "a later load gave an earlier step"
    assert len(set(seen)) > 3, f"only the steps {sorted(set(seen))} were read, {replaced} loads were told of a new one"
    print(f"{len(seen)} loads of {len(set(seen))} steps, {replaced} told that the checkpoint was replaced")


def read_often(folder: Path, loads: int) -> tuple[list[int], int]:
    seen: list[int] = []
    replaced = 0
    for _ in range(loads):
        try:
            seen.append(loaded_step(folder))
        except CheckpointReplacedError:
            replaced += 1
    return seen, replaced


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
