"""Kill saves at random moments, so many times; after each kill exactly the old or the new step must load.

python kill_saves.py FOLDER KILLS SEED
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import hpdcp
from hpdcp._format.metadata import Metadata
from tests.faults.forking import fork, loaded_step, state, wait
from tests.support.workers import wait_until


def main(folder: Path, kills: int, seed: int) -> None:
    progress = mmap.mmap(-1, 24)

    def note(position: int, step: int) -> None:
        progress[position * 8 : position * 8 + 8] = step.to_bytes(8, "little")

    def noted(position: int) -> int:
        return int.from_bytes(progress[position * 8 : position * 8 + 8], "little")

    def save_forever() -> None:
        for step in itertools.count(noted(0) + 1):
            note(0, step)
            hpdcp.save(state(step), checkpoint_id=folder)
            note(1, step)

    def loaded() -> int:
        """What loads, as a child finds it: on some file systems a load starts threads, and this process must fork."""
        assert wait(fork(lambda: note(2, loaded_step(folder)))) == 0
        return noted(2)

    def save_twice() -> None:
        hpdcp.save(state(0), checkpoint_id=folder)
        began = time.monotonic()
        hpdcp.save(state(0), checkpoint_id=folder)
        note(2, round((time.monotonic() - began) * 1e6))

    with tempfile.TemporaryDirectory() as elsewhere:
        # Here, so that no child has to import what a save and a load need.
        hpdcp.save(state(0), checkpoint_id=elsewhere)
        loaded_step(Path(elsewhere))
    assert wait(fork(save_twice)) == 0
    longest = 3e-6 * noted(2)
    chance = random.Random(seed)
    halves = 0
    for _ in range(kills):
        before = noted(0)
        pid = fork(save_forever)
        wait_until(lambda: noted(0) > before, 60, "the child saves")  # noqa: B023  # called at once
        time.sleep(chance.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        assert wait(pid) == -signal.SIGKILL
        begun, done = noted(0), noted(1)
        step = loaded()
        # A save that did not return may have been published all the same; nothing older and nothing newer may load.
        assert step in (done, begun), f"{step} loads; step {done} was saved last, and {begun} was being saved"
        halves += begun > done
        note(0, step)
        note(1, step)

    hpdcp.save(state(10**6), checkpoint_id=folder)
    assert loaded_step(folder) == 10**6
    check_nothing_is_left_for_ever(folder)
    assert halves > kills // 4, f"only {halves} of {kills} kills hit a save"
    print(f"{kills} kills, {halves} of them in a save")


def check_nothing_is_left_for_ever(folder: Path) -> None:
    """A day later, the next save removes whatever the killed ones left."""
    yesterday = time.time() - 25 * 3600
    for path in folder.iterdir():
        os.utime(path, (yesterday, yesterday))
    metadata = hpdcp.save(state(10**6 + 1), checkpoint_id=folder)
    assert isinstance(metadata, Metadata)
    assert loaded_step(folder) == 10**6 + 1
    left = {path.name for path in folder.iterdir()} - {".metadata", ".attempt", *metadata.files}
    temporary = {name for name in left if name.startswith(".hpdcp-tmp-")}
    assert left == temporary, f"{len(left - temporary)} files stay for ever: {sorted(left - temporary)[:5]}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
