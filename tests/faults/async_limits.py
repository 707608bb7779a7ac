"""Save in the background again and again: few descriptors, flat memory, whatever else the trainer does.

python async_limits.py FOLDER
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

import hpdcp
from tests.faults.forking import loaded_step, state
from tests.support.workers import workers_of

MIB = 1 << 20
SAVES = 20


def few_descriptors_for_many_tensors(folder: Path) -> None:
    many = {str(number): torch.full((4,), float(number)) for number in range(3000)}
    for turn in range(2):
        hpdcp.async_save(many, checkpoint_id=folder / f"many{turn}").get_result(60)
        target = {name: torch.zeros(4) for name in many}
        hpdcp.load(target, checkpoint_id=folder / f"many{turn}")
        assert all(torch.equal(target[name], many[name]) for name in many)


def flat_memory_and_descriptors(folder: Path) -> None:
    processes = [psutil.Process(), *workers_of()]
    assert len(processes) == 2
    large = {"w": torch.zeros(8 * MIB), "log": ["x" * 1000] * 100}
    seen: list[list[tuple[int, int, int]]] = []
    for step in range(SAVES):
        large["w"].fill_(step)
        hpdcp.async_save(large, checkpoint_id=folder / f"large{step % 2}").get_result(60)
        if step >= 4:
            seen.append([(p.num_fds(), p.num_threads(), p.memory_info().rss) for p in processes])
    for number, who in enumerate(("trainer", "worker")):
        first, last = seen[0][number], seen[-1][number]
        assert last[0] <= first[0], f"{who}: {first[0]} descriptors became {last[0]}"
        assert last[0] < 64, f"{who}: {last[0]} descriptors"
        assert last[1] <= first[1] + 1, f"{who}: {first[1]} threads became {last[1]}"
        assert last[2] - first[2] < 16 * MIB, f"{who}: {(last[2] - first[2]) / MIB:.1f} MiB more"
    target = {"w": torch.empty(8 * MIB), "log": None}
    hpdcp.load(target, checkpoint_id=folder / f"large{(SAVES - 1) % 2}")
    assert bool((target["w"] == SAVES - 1).all())


def forks_do_not_disturb(folder: Path) -> None:
    """A loader's processes are forked while a save is in flight, and end before and after it has landed."""
    (worker,) = workers_of()
    data = TensorDataset(torch.arange(64.0))
    for step in range(1, 4):
        response = hpdcp.async_save(state(step), checkpoint_id=folder / "forked")
        batches = list(DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork"))
        assert len(batches) == 8
        response.get_result(60)
        assert loaded_step(folder / "forked") == step
    assert workers_of() == [worker]


def a_forked_child_may_save_by_itself(folder: Path) -> None:
    before = workers_of()
    child = os.fork()
    if child == 0:
        # Through a worker of its own: its parent's belongs to the parent.
        status = 1
        try:
            hpdcp.async_save(state(7), checkpoint_id=folder / "child").get_result(60)
            status = 0
        finally:
            sys.stdout.flush()
            # As a script does that ends: its worker is let go of.
            hpdcp.wait_for_saves()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert loaded_step(folder / "child") == 7
    assert workers_of() == before
    hpdcp.async_save(state(8), checkpoint_id=folder / "forked").get_result(60)
    assert loaded_step(folder / "forked") == 8


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
    few_descriptors_for_many_tensors(Path(sys.argv[1]))
    flat_memory_and_descriptors(Path(sys.argv[1]))
    forks_do_not_disturb(Path(sys.argv[1]))
    a_forked_child_may_save_by_itself(Path(sys.argv[1]))
    print("within limits")
