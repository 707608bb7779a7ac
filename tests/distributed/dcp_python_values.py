"""Python values of which each rank has its own, or has under its own keys, and objects that wait for one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpdcp
from hpdcp._base.errors import MissingKeysError
from tests.support.job import Job

RANKS = 4

BIG = 3 << 20
"""Bytes: replicas as large as this were once not compared by default."""


@pytest.mark.parametrize("size", [10, BIG])
@pytest.mark.parametrize("use_collectives", [True, False])
def test_keys_that_only_one_rank_has_are_stored_from_it(
    ranks: Job, folder: Path, size: int, use_collectives: bool
) -> None:
    def state(fill: int) -> dict[str, Any]:
        deep = {"a": {f"r{ranks.rank}": [fill]}, "all": 1 if fill else 0}
        return {"rng": {f"rank{ranks.rank}": bytes([fill]) * size}, "deep": deep}

    hpdcp.save(state(ranks.rank + 1), checkpoint_id=folder, use_collectives=use_collectives)
    ranks.barrier()
    target = state(0)
    hpdcp.load(target, checkpoint_id=folder, use_collectives=use_collectives)
    assert target == state(ranks.rank + 1)
    if not use_collectives:
        return  # a rank's own record is all it needs
    everything: dict[str, Any] = {"rng": None, "deep": {}}
    hpdcp.load(everything, checkpoint_id=folder)
    assert everything["rng"] == {f"rank{rank}": bytes([rank + 1]) * size for rank in range(RANKS)}
    assert everything["deep"] == {"a": {f"r{rank}": [rank + 1] for rank in range(RANKS)}, "all": 1}
    with pytest.raises(MissingKeysError, match=r"'rng\.rank9'"):
        hpdcp.load({"rng": {"rank9": 0}}, checkpoint_id=folder)


def test_what_only_some_ranks_have_anything_in_gives_way_to_what_the_others_have(ranks: Job, folder: Path) -> None:
    hpdcp.save({"m": {"x": 1} if ranks.rank == 2 else {}}, checkpoint_id=folder)
    for empty in ({}, None):
        state: dict[str, Any] = {"m": empty}
        hpdcp.load(state, checkpoint_id=folder)
        assert state == {"m": {"x": 1}}
    named = {"m": {"x": 0}}
    hpdcp.load(named, checkpoint_id=folder)
    assert named == {"m": {"x": 1}}


def test_an_empty_optimizer_beside_filled_ones_is_no_error(ranks: Job, folder: Path) -> None:
    def state(fill: float) -> dict[str, Any]:
        return {"state": {} if ranks.rank else {0: {"step": torch.tensor(fill)}}, "param_groups": [{"lr": fill}]}

    hpdcp.save({"optim": state(2.0)}, checkpoint_id=folder)
    target = state(1.0)
    hpdcp.load({"optim": target}, checkpoint_id=folder)
    assert target == state(2.0)


class Waits:
    """Meets the other ranks whenever it is asked or given something, as a sharded data loader does."""

    def __init__(self, name: int, group: Any) -> None:
        self.name = name
        self.group = group

    def _meet(self) -> None:
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
        dist.all_gather(gathered, torch.tensor([self.name]), group=self.group)
        assert {int(each) for each in gathered} == {self.name}

    def state_dict(self) -> dict[str, Any]:
        self._meet()
        return {"name": self.name, "inner": {"n": 1}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._meet()
        assert state["name"] == self.name


def test_objects_that_wait_for_one_another_meet_whatever_the_order_of_each_rank_s_keys(
    ranks: Job, folder: Path
) -> None:
    group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    made = [(str(number), Waits(number, group)) for number in range(5)]
    order = made[ranks.rank :] + made[: ranks.rank]
    if ranks.rank % 2:
        order.reverse()
    state = {"x": dict(order[:2]) | dict(order[2:]), **{f"y{name}": [it] for name, it in order}}
    state = dict(reversed(state.items())) if ranks.rank == 2 else state
    hpdcp.save(state, checkpoint_id=folder)
    hpdcp.load(state, checkpoint_id=folder)
