"""Run a test file on several ranks, and python code in a process of its own; nothing outlives its time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from tests.support.forked import ROOT, Forked, variables

__all__ = ["ROOT", "forked_python", "is_rank", "run_python", "run_ranks"]

_TAIL = 12_000
"""Characters of output shown of a run that failed."""


def is_rank() -> bool:
    """Whether this process is one rank of a job."""
    return "RANK" in os.environ and "MASTER_PORT" in os.environ


def run_ranks(
    ranks: int, file: str | Path, *arguments: str, timeout: float = 120, environment: Mapping[str, str] | None = None
) -> str:
    """Run the test file under torchrun with that many ranks; its output, once every rank has passed.

    `arguments` go to pytest (`"-k"`, `"name"`). Each rank dumps its stacks shortly before `timeout` seconds, and
    at `timeout` all processes are killed.

    Raises:
        AssertionError: a rank failed, or the time was up; the message ends with the last output.
    """
    # Elastic's own store picks the port, so that runs side by side cannot take each other's.
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    pytest = ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={timeout * 0.8:.0f}"]
    return run_python([*launch, *pytest, str(file), *arguments], timeout=timeout, environment=environment)


def run_python(
    arguments: Sequence[str], *, timeout: float = 60, environment: Mapping[str, str] | None = None, expect: int = 0
) -> str:
    """Run this interpreter with `arguments` from the repository's root; stdout and stderr together.

    Raises:
        AssertionError: the exit status is not `expect`, or the time was up; the message ends with the last output.
    """
    # A file, not a pipe: a descendant that survives would hold a pipe open, and with it this call.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT, env=variables(environment or {}), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_tree(process)
        return _checked(output, arguments, status, expect, timeout)


def forked_python(
    arguments: Sequence[str], *, timeout: float = 60, environment: Mapping[str, str] | None = None, expect: int = 0
) -> str:
    """As `run_python`, in a child of the fork server: for all but what is about a fresh interpreter, or its imports."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        program = Forked(arguments, output=output, environment=variables(environment or {}))
        try:
            status: int | None = program.wait(timeout)
        except TimeoutError:
            status = None
        finally:
            program.kill()
        return _checked(output, arguments, status, expect, timeout)


def _checked(output: IO[str], arguments: Sequence[str], status: int | None, expect: int, timeout: float) -> str:
    output.seek(0)
    text = output.read()
    command = " ".join(arguments)
    assert status is not None, f"{command}\nran longer than {timeout} s; it ended with:\n{text[-_TAIL:]}"
    assert status == expect, f"{command}\nexited with {status}, not {expect}; it ended with:\n{text[-_TAIL:]}"
    return text


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its descendants; torchrun gives each worker a session, so a process group misses them."""
    if process.poll() is not None:
        return
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family, timeout=10)
