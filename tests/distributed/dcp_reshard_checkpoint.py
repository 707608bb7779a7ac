"""Load a checkpoint under another layout than it has, and save it so: `HPDCP_TEST_FOLDER`'s `flat` as `sharded`."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import hpdcp
from tests.support.job import Job
from tests.support.layouts import FSDP4, TP4_COLUMNS


def test_a_checkpoint_is_loaded_in_shards_and_saved_in_shards(ranks: Job) -> None:
    folder = Path(os.environ["HPDCP_TEST_FOLDER"])
    stored = hpdcp.FileSystemReader(folder / "flat").load_metadata().state_dict_metadata
    state: dict[str, torch.Tensor] = {}
    for number, (name, entry) in enumerate(stored.items()):
        assert not isinstance(entry, dict)
        full = torch.zeros(entry.size, dtype=getattr(torch, entry.dtype))  # type: ignore[union-attr]
        state[name] = (TP4_COLUMNS if number % 2 else FSDP4).place(ranks, full)
    hpdcp.load(state, checkpoint_id=folder / "flat")
    hpdcp.save(state, checkpoint_id=folder / "sharded")
