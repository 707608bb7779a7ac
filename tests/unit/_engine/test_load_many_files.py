"""A checkpoint of very many files keeps few of them open."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpdcp
from hpdcp._base.backend import ByteRange
from hpdcp._plan.save_plan import SavePlan
from hpdcp_backends.local import LocalBackend

_FILES = 60


class _OneFileEach(hpdcp.StandardSavePlanner):
    """Writes every item in a wave, and so in a file, of its own."""

    def waves(self, plan: SavePlan) -> Iterable[np.ndarray[Any, np.dtype[np.int64]]]:
        return ([np.array([row], dtype=np.int64) for row in range(len(plan))]) if len(plan) else super().waves(plan)


def test_descriptors_stay_flat_over_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"t{number:04d}": torch.full((3,), float(number)) for number in range(_FILES)}
    hpdcp.save(state, checkpoint_id=tmp_path, planner=_OneFileEach())
    assert len(list(tmp_path.glob("_rank0_*.safetensors"))) == _FILES

    most = 0
    read_ranges = LocalBackend.read_ranges

    def counting(self: LocalBackend, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        nonlocal most
        read_ranges(self, key, ranges, into)
        most = max(most, len(os.listdir("/proc/self/fd")))

    monkeypatch.setattr(LocalBackend, "read_ranges", counting)
    before = len(os.listdir("/proc/self/fd"))
    targets = {key: torch.zeros(3) for key in state}
    hpdcp.load(targets, checkpoint_id=tmp_path)
    assert all(torch.equal(targets[key], state[key]) for key in state)
    assert most <= before + 10
    assert len(os.listdir("/proc/self/fd")) <= before + 1
