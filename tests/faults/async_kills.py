"""Kill trainers that save in the background, their workers, or both, at random moments; after each, a whole step loads.

    python async_kills.py FOLDER ROUNDS SEED

The trainers are forked from this process, which has imported everything and started no thread.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil

import hpdcp
from hpdcp._base.errors import WorkerDiedError
from tests.faults.forking import fork, loaded_step, state, wait
from tests.support.workers import wait_until, workers_of

BEGUN, LANDED, SAID = range(3)


class Board:
    """Numbers that a trainer writes down where its parent reads them, whatever becomes of it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64)

    def __setitem__(self, place: int, value: int) -> None:
        self._memory[place * 8 : place * 8 + 8] = value.to_bytes(8, "little")

    def __getitem__(self, place: int) -> int:
        return int.from_bytes(self._memory[place * 8 : place * 8 + 8], "little")


def train(folder: Path, board: Board) -> None:
    """Save step after step; a worker that is killed is reported, and the next step is saved by another."""
    for step in itertools.count(board[BEGUN] + 1):
        board[BEGUN] = step
        try:
            hpdcp.async_save(state(step), checkpoint_id=folder).get_result(60)
        except WorkerDiedError:
            board[SAID] += 1
        else:
            board[LANDED] = step


def main(folder: Path, rounds: int, seed: int) -> None:
    board = Board()
    chance = random.Random(seed)
    hpdcp.save(state(0), checkpoint_id=folder)
    for number in range(rounds):
        begun = board[BEGUN]
        trainer = fork(lambda: train(folder, board))
        wait_until(lambda: board[LANDED] > begun, 60, "the trainer saves")  # noqa: B023  # called at once
        (worker,) = workers_of(trainer)
        time.sleep(chance.uniform(0, 0.1))
        if number % 3 == 0:
            said, landed = board[SAID], board[LANDED]
            worker.kill()
            # It may have published before; then the save has succeeded.
            wait_until(lambda: board[SAID] > said or board[LANDED] > landed, 10, "a killed worker is noticed")  # noqa: B023
            check(folder, board)
            wait_until(lambda: board[LANDED] > landed + 1, 60, "another worker saves")  # noqa: B023
            (worker,) = workers_of(trainer)
        if number % 3 == 1:
            worker.kill()
        os.kill(trainer, signal.SIGKILL)
        assert wait(trainer) == -signal.SIGKILL
        wait_until(lambda: not is_there(worker), 5, "no worker outlives its trainer")  # noqa: B023
        check(folder, board)
        board[LANDED] = board[BEGUN] = loaded_step(folder)
    hpdcp.save(state(10**6), checkpoint_id=folder)
    assert loaded_step(folder) == 10**6
    print(f"{rounds} trainers killed after {board[BEGUN]} saves, {board[SAID]} workers reported dead")


def is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def check(folder: Path, board: Board) -> None:
    # A save whose end nobody heard of may have been published; nothing older and nothing newer may load.
    landed, step, begun = board[LANDED], loaded_step(folder), board[BEGUN]
    assert landed <= step <= begun, f"{step} loads; {landed} had landed, {begun} was called"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
