"""A small state for saves in the background, and what is to be found of it afterwards."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Final

import torch

import hpdcp
from tests.support.workers import workers_of

SOON: Final = 60.0
"""Seconds in which any of these saves is done, however busy the machine is."""


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((4,), value), "n": [value]}


def check(folder: Path, value: float) -> None:
    target = {"w": torch.zeros(4), "n": None}
    hpdcp.load(target, checkpoint_id=folder)
    assert target["w"].tolist() == [value] * 4
    assert target["n"] == [value]


def stopped_worker() -> int:
    """The process id of this process's worker, which does nothing until it is told to go on."""
    hpdcp.start_async_worker()
    (worker,) = workers_of()
    worker.send_signal(signal.SIGSTOP)
    return worker.pid
