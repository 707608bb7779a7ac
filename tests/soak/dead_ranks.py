"""Kill or interrupt one of three ranks at every message that they exchange; the others must raise soon.

    python -m tests.soak.dead_ranks FOLDER [--seconds 3600] [--kills N] [--seed S]

The ranks are forked from this process and save, save over, or load, with small and with large answers, each for itself
or with broadcasts. The victim ends by SIGKILL before or after its n-th send, receive or collective, or is interrupted
(KeyboardInterrupt, SystemExit, GeneratorExit) in its state's own `state_dict()` or `load_state_dict()`. After each,
every survivor has raised within `SOON` seconds, or ended well where nothing was left to do, and the folder loads as
one whole step, the old or the new one. Ends with one line that sums up; any finding is an AssertionError with the seed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hpdcp
from hpdcp._base import config
from hpdcp._base.errors import HpdcpError
from hpdcp._comm.process_group import ProcessGroupExchange
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
from tests.faults.forking import fork, wait

RANKS = 3
ROWS = 8
SOON = 10.0
"""Seconds in which every survivor must have raised; the process group's own timeout is a minute."""
ACTIONS = ("save", "save again", "load", "load with broadcasts")
INTERRUPTS: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit, GeneratorExit)
MOST_MESSAGES = 24
LARGE = 400
"""So many keys that metadata and plans are longer than what is sent to each rank by itself."""


@dataclass(frozen=True)
class Case:
    """One rank's end."""

    action: str
    large: bool
    victim: int
    message: int
    """The number of the message at which it ends; 0: in its state's own functions."""
    after: bool
    """Once the message has gone, and not before."""
    interrupt: int
    """Which interrupt, or -1 for SIGKILL."""

    @classmethod
    def draw(cls, chance: random.Random) -> Case:
        interrupt = chance.choice((-1, -1, -1, 0, 1, 2))
        # What comes in the midst of a message comes by signal and is raised when that is through.
        message = 0 if interrupt >= 0 else chance.randint(1, MOST_MESSAGES)
        return cls(
            chance.choice(ACTIONS),
            chance.random() < 0.3,
            chance.randrange(RANKS),
            message,
            chance.random() < 0.5,
            interrupt,
        )

    def end(self) -> None:
        if self.interrupt >= 0:
            raise INTERRUPTS[self.interrupt]
        os.kill(os.getpid(), signal.SIGKILL)


class Ending:
    """An object with state, whose functions may not return."""

    def __init__(self, end: Callable[[], None] | None) -> None:
        self.end = end

    def state_dict(self) -> dict[str, int]:
        if self.end is not None:
            self.end()
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class EndingLater(Ending):
    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.end is not None:
            self.end()


def end_at_message(case: Case) -> None:
    """Have this process end at that message of its next exchange."""
    left = case.message

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not case.after:
                case.end()
            done = call(*arguments, **options)
            if left == 0:
                case.end()
            return done

        return wrapped

    for owner, names in ((ProcessGroupExchange, ("_send", "_receive")), (dist, ("all_reduce", "broadcast"))):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))


def state(rank: int, step: int, *, large: bool, odd: Ending) -> dict[str, Any]:
    mine = torch.full((ROWS, 16), float(step))
    box = ChunkStorageMetadata((rank * ROWS, 0), (ROWS, 16))
    setattr(mine, CHUNK_INFO, ChunkInfo(box, (ROWS * RANKS, 16)))
    many = {f"key {number}": torch.full((4,), float(step)) for number in range(LARGE if large else 4)}
    return {"w": mine, "many": many, "step": step, "odd": odd, "rng": hpdcp.PerRank([rank, step])}


def run_rank(rank: int, port: int, folder: Path, case: Case, ending: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    hpdcp.save(state(rank, 1, large=case.large, odd=Ending(None)), checkpoint_id=folder)
    if case.action == "save again":
        hpdcp.save(state(rank, 1, large=case.large, odd=Ending(None)), checkpoint_id=folder)
    end = case.end if rank == case.victim and not case.message else None
    loads = case.action.startswith("load")
    new = state(rank, 2, large=case.large, odd=EndingLater(end) if loads and case.after else Ending(end))
    dist.barrier()
    if rank == case.victim and case.message:
        end_at_message(case)
    began = time.monotonic()
    try:
        with config.using(group_timeout=60):
            if loads:
                hpdcp.load(new, checkpoint_id=folder, broadcast_replicated_tensors="with" in case.action)
            else:
                hpdcp.save(new, checkpoint_id=folder)
        how = "done"
    except HpdcpError as error:
        how = f"{type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001  # the victim's own
        how = f"interrupted by {type(error).__name__}"
    ending.write_text(f"{time.monotonic() - began:.3f} {how}")
    # As a script that goes on for a while without taking leave: nobody is helped by its connections' end.
    time.sleep(0.1)
    while not all(ending.with_name(str(other)).exists() for other in range(RANKS) if other != case.victim):
        if time.monotonic() - began > SOON:
            break
        time.sleep(0.01)
    os._exit(0)


def check(case: Case, folder: Path) -> str:
    """Run it, and return how the survivors ended: "raised" or "done"; AssertionError for any other end."""
    endings = [folder / str(rank) for rank in range(RANKS)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    pids = [
        fork(lambda rank=rank: run_rank(rank, port, folder / "ckpt", case, endings[rank]))  # type: ignore[misc]
        for rank in range(RANKS)
    ]
    exits = [wait(pid) for pid in pids]
    survivors = [rank for rank in range(RANKS) if rank != case.victim]
    assert all(exits[rank] == 0 for rank in survivors), exits
    texts = [endings[rank].read_text() for rank in survivors]
    assert all(float(text.split()[0]) < SOON for text in texts), texts
    killed = exits[case.victim] != 0
    victim = "killed" if killed else endings[case.victim].read_text().partition(" ")[2]
    hows = {text.split()[1] for text in texts}
    if killed or victim.startswith("interrupted"):
        assert killed or victim == f"interrupted by {INTERRUPTS[case.interrupt].__name__}", victim
        # Whom the coordinator had told before it died, or the tree of a large answer had reached, is rightly content.
        partly = killed and (case.victim == 0 or case.large)
        assert hows == {"done"} or "done" not in hows or partly, texts
        if case.interrupt >= 0:
            assert all(f"rank {case.victim}: {INTERRUPTS[case.interrupt].__name__}" in text for text in texts), texts
    else:
        assert hows == {"done"} and victim == "done", (texts, victim)
    target = state(0, -1, large=case.large, odd=Ending(None))
    target["w"] = torch.zeros(ROWS * RANKS, 16)
    del target["rng"]
    hpdcp.load(target, checkpoint_id=folder / "ckpt")
    step = target["step"]
    assert step == (1 if case.action.startswith("load") or hows != {"done"} else 2) or (killed and step in (1, 2)), step
    for tensor in (target["w"], *target["many"].values()):
        assert bool((tensor == step).all()), (step, tensor)
    return "done" if hows == {"done"} else "raised"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--kills", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    print(f"dead ranks: seed {options.seed}", flush=True)
    ends: dict[str, int] = {"raised": 0, "done": 0}
    last = time.monotonic() + options.seconds
    number = 0
    while number < options.kills and time.monotonic() < last:
        case = Case.draw(chance)
        number += 1
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            try:
                ends[check(case, Path(folder))] += 1
            except BaseException as error:
                error.add_note(f"seed {options.seed}, number {number}: {case}")
                raise
    print(
        f"dead ranks: {number} ranks ended; {ends['raised']} times the others raised within {SOON:.0f} s, "
        f"{ends['done']} times nothing was left to do; no finding"
    )


if __name__ == "__main__":
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        # Read when numpy is imported, which starts threads otherwise: and a process with threads must not be forked.
        variables = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.soak.dead_ranks", *sys.argv[1:]], os.environ | variables
        )
    main(sys.argv[1:])
