"""Programs in children of a fork server (`tests.support.fork_server`), which has imported torch and hpdcp already.

For everything but tests of a fresh interpreter: of what an import costs, loads or prints, or of `python -m hpdcp`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from tests.support.fork_server import Request

ROOT: Final = Path(__file__).resolve().parents[2]
_SERVERS: Final = 2
_ON_CPU: Final = os.environ.get("HYPER_PARALLEL_TEST_DEVICE_TYPE", "cpu") == "cpu"
_START_SECONDS: Final = 120
"""For a server to import everything, on a machine that is busy."""


class _Descriptor(Protocol):
    def fileno(self) -> int: ...


def variables(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that a test starts: this one's, one thread, and the library to be found."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # Torch would tell of every wait for the rendezvous store that is longer than a second: pages of it for a slow test.
    usual = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return os.environ | usual | dict(changes)


class Forked:
    """A program that runs in a child of the server; killed with all descendants when it is let go of."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        output: _Descriptor,
        errors: _Descriptor | None = None,
        feed: _Descriptor | None = None,
        environment: Mapping[str, str],
        number: int = 0,
    ) -> None:
        """`arguments` as for `python`; `output` gets stdout, and stderr too without `errors`; `feed` is its stdin.

        `environment` is all that the program finds in its own. What matters only when torch is imported, such as
        `OMP_NUM_THREADS`, is the server's. Programs of different `number` may hash strings differently, as
        interpreters of their own do, so that ranks that rely on the order of a set do not go unnoticed.
        """
        request = pickle.dumps(Request(list(arguments), dict(environment), str(ROOT)))
        self._line, theirs = socket.socketpair()
        with open(os.devnull, "rb") as nothing, theirs:
            descriptors = [(feed or nothing).fileno(), output.fileno(), (errors or output).fileno(), theirs.fileno()]
            socket.send_fds(_server(number % _SERVERS), [request], descriptors)
        self._line.settimeout(_START_SECONDS)
        self.returncode: int | None = None
        self.pid = self._receive()

    def _receive(self) -> int:
        told = self._line.recv(4, socket.MSG_WAITALL)
        assert len(told) == 4, "the fork server is gone; its traceback is above, or at the end of the run's stderr"
        return int.from_bytes(told, "little", signed=True)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, or minus the number of the signal that ended it; TimeoutError when it runs longer."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            self.returncode = self._receive()
            self._line.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and its descendants, and return once it has ended."""
        if self.returncode is None:
            self._line.shutdown(socket.SHUT_WR)
            self.wait()


@functools.cache
def _server(number: int) -> socket.socket:
    """What takes requests. The server ends, and all its children, when nobody holds the other end any more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # A real torch_npu would take the place of the device that tests make up, and must not be opened before a fork.
        environment = variables({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if _ON_CPU else {})
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
            cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
