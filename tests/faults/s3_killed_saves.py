"""Saves in processes that can be killed: for each line `STEP URL` of stdin, one child saves that step there.

Prints the child's process id as it starts, and its exit status when it has ended.
"""

from __future__ import annotations

import sys

import hpdcp
from tests.faults.forking import fork, wait
from tests.faults.s3_faults import state


def main() -> None:
    for line in sys.stdin:
        step, url = line.split()
        made = state(int(step))

        def save(made: dict[str, object] = made, url: str = url) -> None:
            hpdcp.save(made, checkpoint_id=url)

        child = fork(save)
        print(child, flush=True)
        print(wait(child), flush=True)


if __name__ == "__main__":
    main()
