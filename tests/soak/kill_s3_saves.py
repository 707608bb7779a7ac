"""Kill saves to S3 at random moments; afterwards exactly the old or the new step must load.

python tests/services/s3.py --memory -- python -m tests.soak.kill_s3_saves KILLS SEED
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid

import hpdcp
from tests.faults.s3_faults import loaded_step, state
from tests.services import s3


def main(kills: int, seed: int) -> None:
    chance = random.Random(seed)
    url = f"s3://{s3.BUCKET}/soak-{uuid.uuid4().hex}"
    hpdcp.save(state(0), checkpoint_id=url)
    began = time.monotonic()
    hpdcp.save(state(0), checkpoint_id=url)
    longest = 1.5 * (time.monotonic() - began)
    saver = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.s3_killed_saves"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert saver.stdin is not None and saver.stdout is not None
    old = new = 0
    last = 0
    for step in range(1, kills + 1):
        saver.stdin.write(f"{step} {url}\n")
        saver.stdin.flush()
        pid = int(saver.stdout.readline())
        time.sleep(chance.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        status = int(saver.stdout.readline())
        found = loaded_step(url)
        assert found in ((last, step) if status else (step,)), f"{found} loads after {last}, {step} (seed {seed})"
        old, new, last = old + (found != step), new + (found == step), found
    saver.communicate(timeout=60)
    print(f"{kills} kills of saves to S3: {old} left the old step, {new} the new one")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
