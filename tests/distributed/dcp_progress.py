"""Two ranks that hold the same tensors: one bar, of what rank 0 writes, and then reads for both."""

from __future__ import annotations

from pathlib import Path

import torch

import hpdcp
from tests.support.job import Job
from tests.unit._base.test_progress import Recorder, drawn

__all__ = ["drawn"]

RANKS = 2


def test_rank_0_counts_its_own_share(ranks: Job, folder: Path, drawn: list[Recorder]) -> None:
    state = {f"w{number}": torch.full((5000,), float(number)) for number in range(10)}
    with hpdcp.config.using(progress="always"):
        hpdcp.save(state | {"n": hpdcp.PerRank(ranks.rank)}, checkpoint_id=folder)
        for batch_bytes in (0, 6 << 20):
            into = {key: torch.zeros_like(value) for key, value in state.items()}
            hpdcp.load(into, checkpoint_id=folder, broadcast_replicated_tensors=True, broadcast_batch_bytes=batch_bytes)
            assert all(torch.equal(into[key], value) for key, value in state.items())
    if ranks.rank:
        assert drawn == []
        return
    save, *loads = drawn
    # One half of ten tensors of 20,000 bytes, and the one value of its own, a few bytes long.
    assert save.total is not None
    assert save.label == "save"
    assert 100_000 <= save.total < 101_000
    assert save.seen[-1] == save.total
    # Each its half; in one batch, one rank reads all for both.
    apart, together = loads
    assert (apart.label, apart.total, apart.seen[-1]) == ("load", 100_000, 100_000)
    assert (together.total, together.seen[-1:]) in [(200_000, [200_000]), (0, [])]
