"""A process that has imported what tests need once, and forks: a program then starts in milliseconds, not seconds.

    python -m tests.support.fork_server DESCRIPTOR

It is the other side of `tests.support.forked`. It has one thread, no process group and no device, and runs nothing by
itself, so that its children are as good as fresh interpreters: a child leaves the server's loop, runs its program as
`__main__`, and ends as any interpreter does, by way of `atexit`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import runpy
import selectors
import signal
import socket
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psutil

IMPORTS: Final = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "hpdcp.cli",
    "hpdcp.testing",
    "hpdcp_backends.local",
    "hypothesis",
    "safetensors.torch",
    "pytest",
)
"""None of `tests`: pytest rewrites their assertions when it imports them."""
REQUEST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """A program to run in a child. Its descriptors 0, 1 and 2 come with it, and the line that its caller listens on:
    the child's process id, later its exit status (minus the number of a signal), each 4 bytes."""

    arguments: Sequence[str]
    """As for `python`: options `-W`, then `-c CODE`, `-m MODULE` or a file, then the rest of `sys.argv`."""
    environment: Mapping[str, str]
    folder: str


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTS:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"the imports left {threads} threads, and a fork copies one alone"
    # A collection in a child would touch, and so copy, everything that was imported: 0.6 s of each child's end.
    gc.collect()
    gc.freeze()
    request = _Server(control).serve()
    if request is not None:
        _run(request)


class _Server:
    """Forks for each request, tells how children end, and kills those whose callers are gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lines: dict[int, socket.socket] = {}
        """Of each child that runs, the line to its caller."""
        self._selector = selectors.DefaultSelector()
        self._ended, self._wake = socket.socketpair()
        self._ended.setblocking(False)
        self._wake.setblocking(False)

    def serve(self) -> Request | None:
        """None once nobody can ask for anything any more; in a child, what it is to run."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    message, descriptors, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, 4)
                    if not message:
                        for pid in self._lines:
                            kill_tree(pid)
                        return None
                    if self._fork(descriptors):
                        return pickle.loads(message)  # type: ignore[no-any-return]
                elif key.fileobj is self._ended:
                    with contextlib.suppress(BlockingIOError):
                        self._ended.recv(4096)
                    self._reap()
                elif key.data in self._lines:
                    # Callers write nothing: this one has let go of the child, and may wait for its status.
                    self._selector.unregister(key.fileobj)
                    kill_tree(key.data)

    def _fork(self, descriptors: Sequence[int]) -> bool:
        """Whether this is the child."""
        *standard, line = descriptors
        pid = os.fork()
        if pid:
            for descriptor in standard:
                os.close(descriptor)
            self._lines[pid] = socket.socket(fileno=line)
            self._selector.register(self._lines[pid], selectors.EVENT_READ, pid)
            _tell(self._lines[pid], pid)
            return False
        # Signals of the terminal are for the caller, who passes on what it wants to.
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        for end in (self._control, self._ended, self._wake, *self._lines.values()):
            end.close()
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _reap(self) -> None:
        while self._lines:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            line = self._lines.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(line)
            _tell(line, os.waitstatus_to_exitcode(status))
            line.close()


def _tell(line: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        line.sendall(number.to_bytes(4, "little", signed=True))


def kill_tree(pid: int) -> None:
    """Kill the process and its descendants, of whatever sessions and process groups they are."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def _run(request: Request) -> None:
    """What `python` does with such arguments."""
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    arguments = list(request.arguments)
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        sys.warnoptions.append(arguments[1])
        del arguments[:2]
    kind = arguments.pop(0) if arguments[0] in ("-c", "-m") else ""
    if kind == "-m":
        sys.path[0] = request.folder
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = "" if kind else os.path.dirname(os.path.abspath(arguments[0]))
    sys.argv[:] = ["-c", *arguments[1:]] if kind else arguments
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind:
        text, name = arguments[0], "<string>"
    else:
        name = program.__file__ = arguments[0]
        with open(name, encoding="utf-8") as file:
            text = file.read()
    exec(compile(text, name, "exec"), program.__dict__)


if __name__ == "__main__":
    main()
