"""Ranks that nobody watches over: torchrun, and a group of the tests on ranks, would end the others when one dies."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tests.support.forked import Forked, variables


class Rank:
    """A forked rank, and what it prints."""

    def __init__(self, program: Forked, stdout: IO[str]) -> None:
        self._program = program
        self._stdout = stdout

    @property
    def pid(self) -> int:
        return self._program.pid

    def readline(self) -> str:
        """The next line that it prints."""
        return self._stdout.readline()

    def rest(self, timeout: float) -> str:
        """What it prints until it ends; TimeoutError when that takes longer."""
        self._program.wait(timeout)
        return self._stdout.read()

    def kill(self) -> None:
        """End it at once, and return; what it has started is left as it is."""
        self._program.send_signal(signal.SIGKILL)


@contextmanager
def started(ranks: int, program: Path, *arguments: str) -> Iterator[list[Rank]]:
    """`program` on so many ranks; whatever still runs at the end is killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    with ExitStack() as open_, open(os.devnull, "wb") as nothing:
        found = []
        for rank in range(ranks):
            reading, writing = os.pipe()
            stdout = open_.enter_context(open(reading, encoding="utf-8"))
            environment = variables(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            with open(writing, "wb") as output:
                child = Forked(
                    [str(program), *arguments], output=output, errors=nothing, environment=environment, number=rank
                )
            open_.callback(child.kill)
            found.append(Rank(child, stdout))
        yield found
