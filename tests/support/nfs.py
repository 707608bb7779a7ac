"""Commands on a real NFS with two clients, in the background while other tests run."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support.ranks import ROOT

NFS_RUN = ROOT / "tests" / "services" / "nfs_run"
UNAVAILABLE = 125
"""The exit status of nfs_run where no guest can be brought up."""


class GuestRun:
    """A command that was started in the guest."""

    def __init__(self, process: subprocess.Popen[bytes], output: IO[str]) -> None:
        self._process = process
        self._output = output

    def result(self) -> tuple[int, str]:
        """Its exit status and its output, once it has ended; it ends by itself when its time is up."""
        status = self._process.wait()
        self._output.seek(0)
        return status, self._output.read()

    def stop(self) -> None:
        """End it, if it is still running."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
        self._output.close()


def start_in_guest(
    command: Sequence[str | Path], *, timeout: float, environment: Mapping[str, str] | None = None
) -> GuestRun:
    """Start `command` from the repository's root in a guest of its own (tests/services/nfs_run says what it finds).

    The guest has one CPU, and keeps one of this machine's busy. It is stopped after `timeout` seconds.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | dict(environment or {})
    output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open until the run is stopped
    process = subprocess.Popen(
        [NFS_RUN, "--timeout", f"{timeout:g}", "--", *command],
        cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return GuestRun(process, output)
