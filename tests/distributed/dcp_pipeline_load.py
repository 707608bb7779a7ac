"""More to broadcast than is in flight, in groups that interleave, beside objects, again and again; and at random."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import hpdcp
from hpdcp._base import config
from hpdcp._broadcast import _stripes, walk
from tests.support.backends import Traffic, registered
from tests.support.job import Job
from tests.support.layouts import (
    DP2_TP2,
    DP2_TP2_COLUMNS,
    LAYOUTS,
    REPLICATED,
    TP4,
    Layout,
    differing,
    local_of,
)

RANKS = 4

PAIRS: Final = Layout("pairs of neighbours", (2, 2), (Shard(0), Replicate()))
OUTER: Final = Layout("whole on ranks 0 and 3", (2,), (Replicate(),), ranks=(0, 3))
INNER: Final = Layout("whole on ranks 1 and 2", (2,), (Replicate(),), ranks=(1, 2))
TRIPLE: Final = Layout("whole on ranks 0, 2 and 3", (3,), (Replicate(),), ranks=(0, 2, 3))


@pytest.fixture(autouse=True)
def traffic() -> Iterator[Traffic]:
    """What this rank reads, from a store that is far away."""
    with registered() as counted, config.using(backend="counting"):
        counted.reads.clear()
        yield counted


def _interleaved(job: Job, count: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of several sizes and dtypes, group after group in turn, and blank targets for them."""
    layouts = (REPLICATED, DP2_TP2, PAIRS, OUTER, INNER, TRIPLE, TP4, DP2_TP2_COLUMNS)
    dtypes = (torch.float32, torch.bfloat16, torch.int16, torch.float64, torch.bool)
    stored, targets = {}, {}
    for number in range(count):
        layout, dtype = layouts[number % len(layouts)], dtypes[number % len(dtypes)]
        full = (torch.arange(16 * (number % 7 + 1)).reshape(4, -1) + number).to(dtype)
        stored[f"{number:03d}"] = layout.place(job, full)
        targets[f"{number:03d}"] = layout.blank_all(job, {"": full})[""]
    return stored, targets


@pytest.mark.parametrize("batch_bytes", [0, 64, 6 << 20])
def test_many_shards_of_groups_that_interleave(ranks: Job, folder: Path, traffic: Traffic, batch_bytes: int) -> None:
    stored, targets = _interleaved(ranks, 100)
    hpdcp.save(stored, checkpoint_id=folder)
    hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=batch_bytes)
    assert differing(stored, targets) == []
    assert sum(ranks.gather(traffic.nbytes)) == sum(tensor.numel() * tensor.itemsize for tensor in stored.values())


class _Watched:
    """A broadcast under way."""

    def __init__(self, work: dist.Work, flying: set[int], number: int) -> None:
        self._work, self._flying, self._number = work, flying, number

    def wait(self) -> None:
        self._work.wait()
        self._flying.remove(self._number)


def test_at_most_eight_broadcasts_are_in_flight_and_more_than_one(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, targets = _interleaved(ranks, 60)
    hpdcp.save(stored, checkpoint_id=folder)
    flying: set[int] = set()
    sizes: list[int] = []
    send = dist.broadcast

    def watched(tensor: torch.Tensor, **options: Any) -> Any:
        work = send(tensor, **options)
        if not options.get("async_op"):
            return work
        flying.add(len(sizes))
        sizes.append(len(flying))
        return _Watched(work, flying, len(sizes) - 1)

    monkeypatch.setattr(dist, "broadcast", watched)
    hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=0)
    assert differing(stored, targets) == []
    assert max(sizes) == walk.IN_FLIGHT == 8
    assert not flying
    assert len(sizes) > 20


def test_objects_come_back_beside_what_is_broadcast(ranks: Job, folder: Path) -> None:
    full = torch.arange(12.0)
    mine = torch.full((3,), float(ranks.rank))
    state = {
        "w": full,
        "step": 7,
        "rng": hpdcp.PerRank({"at": ranks.rank, "t": mine}),
        "betas": (0.9, [1, {"a": None}]),
    }
    hpdcp.save(state, checkpoint_id=folder)
    blank = torch.full((12,), ranks.sentinel())
    rng = hpdcp.PerRank({"at": -1, "t": torch.full((3,), ranks.sentinel())})
    target: dict[str, Any] = {"w": blank, "step": 0, "rng": rng, "betas": None}
    hpdcp.load(target, checkpoint_id=folder)
    assert torch.equal(blank, full)
    assert target["step"] == 7
    assert target["betas"] == (0.9, [1, {"a": None}])
    assert target["rng"].value["at"] == ranks.rank
    assert torch.equal(target["rng"].value["t"], mine)


def _held() -> dict[str, int]:
    """What this process has of everything that a load may leave behind."""
    return {
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def test_loads_may_be_repeated_and_leave_nothing_behind(ranks: Job, folder: Path) -> None:
    stored, targets = _interleaved(ranks, 24)
    hpdcp.save(stored, checkpoint_id=folder)
    before: dict[str, int] = {}
    for number in range(12):
        if number == 2:
            before = _held()
        for target in targets.values():
            local_of(target).fill_(0)
        hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=(0, 6 << 20)[number % 2])
        assert differing(stored, targets) == []
    after = _held()
    assert all(after[kind] <= before[kind] for kind in before), (before, after)


def _random_case(job: Job, seed: int) -> tuple[dict[str, torch.Tensor], Layout, Layout]:
    chosen = random.Random(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex128, torch.uint64)
    tensors = {}
    for number in range(chosen.randint(1, 12)):
        shape = [chosen.randint(0 if chosen.random() < 0.1 else 1, 13) for _ in range(chosen.randint(0, 3))]
        dtype = chosen.choice(dtypes)
        raw = torch.arange(max(1, torch.Size(shape).numel()) + number) % 120
        tensors[f"t{number}"] = raw[: torch.Size(shape).numel()].to(dtype).reshape(shape)
    return tensors, chosen.choice(LAYOUTS), chosen.choice(LAYOUTS)


def _blank(layout: Layout, job: Job, full: torch.Tensor) -> torch.Tensor:
    placed = layout.place(job, full)
    local_of(placed).fill_(job.rank % 2 if full.dtype == torch.bool else 121 + job.rank)
    return placed


@pytest.mark.parametrize("seed", range(18))
def test_random_states_load_as_a_single_process_reads_them(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    tensors, saved_as, loaded_as = _random_case(ranks, seed)
    chosen = random.Random(-seed)
    hpdcp.save(saved_as.place_all(ranks, tensors), checkpoint_id=folder)
    single = {name: torch.zeros_like(full) for name, full in tensors.items()}
    hpdcp.load(single, checkpoint_id=folder, use_collectives=False)
    assert all(torch.equal(single[name], full) for name, full in tensors.items())
    expected = loaded_as.place_all(ranks, single)
    monkeypatch.setattr(_stripes, "STRIPE_BYTES", chosen.choice([64, 1000, 64 << 20]))
    for shared in (True, False, None):
        targets = {name: _blank(loaded_as, ranks, full) for name, full in single.items()}
        batch_bytes = chosen.choice([0, 50, 400, 6 << 20])
        hpdcp.load(
            targets, checkpoint_id=folder, broadcast_replicated_tensors=shared, broadcast_batch_bytes=batch_bytes
        )
        assert differing(expected, targets) == [], (saved_as, loaded_as, shared, batch_bytes)
