"""Children forked from a process that has imported hpdcp once: a save to be killed costs milliseconds, not seconds.

Only for programs of their own that start no thread: a fork copies one thread alone, with whatever locks others held.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import hpdcp

SHAPE = (48, 512)


def state(step: int, *, rows: int = SHAPE[0]) -> dict[str, object]:
    """A state whose every value says `step`: tensors in several files' worth of dtypes, and Python values."""
    shape = (rows, SHAPE[1])
    return {
        "model": {"w": torch.full(shape, float(step)), "b": torch.full((7,), step, dtype=torch.int64)},
        "optimizer": {"state": {0: {"exp_avg": torch.full(shape, float(step), dtype=torch.float64)}}},
        "step": step,
        "history": [step, (step,), {"at": step}],
    }


def loaded_step(folder: Path, *, rows: int = SHAPE[0]) -> int:
    """The step that a load of `folder` gives; AssertionError when what it gives is not all of one step."""
    target = state(-1, rows=rows)
    hpdcp.load(target, checkpoint_id=folder)
    step = target["step"]
    assert isinstance(step, int)
    expected = state(step, rows=rows)
    assert target["history"] == expected["history"], (target["history"], step)
    for name, found, wanted in (
        ("w", target["model"]["w"], expected["model"]["w"]),  # type: ignore[index]
        ("b", target["model"]["b"], expected["model"]["b"]),  # type: ignore[index]
        ("exp_avg", target["optimizer"]["state"][0]["exp_avg"], expected["optimizer"]["state"][0]["exp_avg"]),  # type: ignore[index]
    ):
        assert torch.equal(found, wanted), f"{name} holds {found.unique().tolist()[:5]}, the step is {step}"
    return step


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child; its process id. The child exits with 0, or with 1 and a traceback."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"this process has {threads} threads and must not be forked"
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:  # noqa: BLE001 - nothing may return into the parent's code
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait(pid: int) -> int:
    """The child's exit status; minus the number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
