"""The background worker of a process, looked at from outside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import psutil


def workers_of(pid: int | None = None) -> list[psutil.Process]:
    """Background workers among the children of a process, this one by default."""
    found = []
    for child in psutil.Process(pid).children():
        try:
            if "hpdcp._background.worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def kill_worker() -> None:
    """End this process's worker, and return once it is known to have ended."""
    (worker,) = workers_of()
    worker.kill()
    # Not only a zombie: that its first thread may be while others still end. hpdcp waits for it too, and who comes
    # second finds no such child, which says that it has ended.
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    """Return as soon as it is true; AssertionError when that takes longer."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"after {seconds} s still not so: {what}"
        time.sleep(0.02)
