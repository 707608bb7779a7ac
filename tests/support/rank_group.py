"""Ranks that are forked, joined by a rendezvous store as torchrun's are, and run the tests of one file one by one."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

from tests.support.forked import Forked, variables
from tests.support.rank_session import STACKS

_COLLECT_SECONDS: Final = 120
"""For all ranks to import the file; seconds, but for a busy machine."""
_AFTER_A_DEATH_SECONDS: Final = 15
"""For the other ranks to notice that one is gone, and report."""
_END_SECONDS: Final = 60
_TAIL: Final = 12_000
"""Characters shown of what a rank that was lost has printed."""


class RanksLostError(Exception):
    """A rank died, or had not finished when the time was up; the group is of no use any more."""


class RankGroup:
    """The ranks of one file in one environment."""

    def __init__(self, file: Path, ranks: int, environment: Mapping[str, str], folder: Path) -> None:
        """Start them, each with its output in a file of `folder`; they have collected the file when this returns."""
        self._store, shared = meet(ranks, environment)
        shared = {name: value for name, value in shared.items() if not name.startswith("PYTEST_")}
        # Ranks have no use for plugins, and importing hypothesis for its own takes longer than most tests.
        shared["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        self._outputs: list[Path] = []
        self._read: list[int] = [0] * ranks
        self._ranks: list[Forked] = []
        self._callers: list[Connection] = []
        folder.mkdir()
        for rank in range(ranks):
            self._outputs.append(folder / f"rank{rank}")
            ours, theirs = socket.socketpair()
            with open(self._outputs[-1], "wb") as output, theirs:
                program = Forked(
                    ["-m", "tests.support.rank_session", str(file)],
                    feed=theirs,
                    output=output,
                    environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    number=rank,
                )
            self._ranks.append(program)
            self._callers.append(Connection(ours.detach()))
        self.lost = False
        """Whether the ranks were killed."""
        self._answers(_COLLECT_SECONDS, "collecting")

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def run(self, test: str, seconds: float) -> list[Any]:
        """What each rank answers about the test.

        Raises:
            RanksLostError: with all that is known of it; the ranks are killed.
        """
        for caller in self._callers:
            with contextlib.suppress(OSError):
                caller.send(test)
        return self._answers(seconds, test)

    def output(self) -> str:
        """What the ranks have printed since this was asked for last."""
        texts = []
        for rank, path in enumerate(self._outputs):
            with open(path, "rb") as file:
                file.seek(self._read[rank])
                text = file.read()
            self._read[rank] += len(text)
            if text.strip():
                texts.append(f"--- rank {rank}:\n{text.decode(errors='replace')}")
        return "\n".join(texts)

    def end(self) -> list[str]:
        """Let the ranks end as scripts do; what went wrong in that."""
        try:
            for caller in self._callers:
                caller.send(None)
            wrong = [f"rank {rank}: {text}" for rank, text in enumerate(self._answers(_END_SECONDS, "the end")) if text]
            until = time.monotonic() + _END_SECONDS
            for number, rank in enumerate(self._ranks):
                status = rank.wait(max(0.1, until - time.monotonic()))
                if status:
                    wrong.append(f"rank {number} exited with {status}")
        except (RanksLostError, OSError) as error:
            wrong = [str(error)]
        if wrong:
            wrong.append(self.output())
        self.kill()
        return wrong

    def kill(self) -> None:
        """End the ranks and whatever they have started."""
        self.lost = True
        for rank in self._ranks:
            rank.kill()
        for caller in self._callers:
            caller.close()

    def _answers(self, seconds: float, what: str) -> Sequence[Any]:
        """One answer of each rank, in order of rank."""
        answers: dict[int, Any] = {}
        waiting = {caller: rank for rank, caller in enumerate(self._callers)}
        gone: list[int] = []
        until = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            for caller in ready:
                assert isinstance(caller, Connection)
                rank = waiting.pop(caller)
                try:
                    answers[rank] = caller.recv()
                except (EOFError, OSError):
                    gone.append(rank)
                    until = min(until, time.monotonic() + _AFTER_A_DEATH_SECONDS)
            if not ready:
                break
        if gone or waiting:
            self._give_up(what, seconds, gone, sorted(waiting.values()))
        return [answers[rank] for rank in range(len(self._ranks))]

    def _give_up(self, what: str, seconds: float, gone: list[int], silent: list[int]) -> None:
        for rank in silent:
            self._ranks[rank].send_signal(STACKS)
        time.sleep(1 if silent else 0)
        self.kill()
        ended = ", ".join(f"rank {rank} ended with {self._ranks[rank].returncode}" for rank in gone)
        hung = f"ranks {silent} were not through after {seconds:g} s" if silent else ""
        text = self.output()
        raise RanksLostError(f"{what}: {'; '.join(filter(None, (ended, hung)))}\n{text[-_TAIL:]}")


def meet(ranks: int, environment: Mapping[str, str]) -> tuple[object, dict[str, str]]:
    """The store that so many ranks meet over, to be kept as long as they live, and what they find in their environment.

    The store is this process's, as torchrun's is its agent's: nobody else can take its port, and it outlives a rank.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, variables(environment) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def run_forked_ranks(ranks: int, arguments: Sequence[str], *, timeout: float, expect: int = 0) -> str:
    """`python` with `arguments` on so many forked ranks, as under torchrun; what all of them printed.

    Raises:
        AssertionError: one exits with another status than `expect`, or the time was up; ends with the output.
    """
    store, shared = meet(ranks, {})
    until = time.monotonic() + timeout
    statuses: list[int | str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        programs = [
            Forked(arguments, output=output, environment=shared | {"RANK": rank, "LOCAL_RANK": rank}, number=int(rank))
            for rank in map(str, range(ranks))
        ]
        for program in programs:
            try:
                statuses.append(program.wait(max(0.1, until - time.monotonic())))
            except TimeoutError:
                statuses.append("killed when its time was up")
            finally:
                program.kill()
        output.seek(0)
        text = output.read()
    del store
    assert statuses == [expect] * ranks, f"{' '.join(arguments)}: {statuses}\n{text[-_TAIL:]}"
    return text


@contextlib.contextmanager
def started(file: Path, ranks: int, environment: Mapping[str, str], folder: Path) -> Iterator[RankGroup]:
    """A group for the time of a test that asks for more than the file's own tests do."""
    group = RankGroup(file, ranks, environment, folder)
    try:
        yield group
    finally:
        group.kill()
