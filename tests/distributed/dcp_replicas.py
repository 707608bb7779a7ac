"""Replicas that differ are refused at every size, in every way of saving; those that may differ are rank 0's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
from hpdcp._base import config
from hpdcp._base.errors import ReplicaMismatchError
from hpdcp._plan import replicas
from hpdcp._plan.plan_cache import PLANS
from tests.support.job import Job
from tests.support.plan_variants import VARIANTS, save_as, walk_all_pairs

RANKS = 3
SOON = 120.0
LARGE = 400_000
"""Elements; above what is compared in full."""

Save = Callable[..., None]


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    PLANS.clear()
    yield
    PLANS.clear()


def save(state: dict[str, Any], folder: Path, **arguments: Any) -> None:
    hpdcp.save(state, checkpoint_id=folder, **arguments)


def async_save(state: dict[str, Any], folder: Path, **arguments: Any) -> None:
    response = hpdcp.async_save(state, checkpoint_id=folder, **arguments)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()  # the samples must have been taken
    response.get_result(SOON)


def in_waves(state: dict[str, Any], folder: Path) -> None:
    with config.using(async_staging_budget=1 << 20):
        async_save(state, folder)


def as_zarr(state: dict[str, Any], folder: Path) -> None:
    with config.using(layout="zarr"):
        save(state, folder)


def in_parts(state: dict[str, Any], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "SPLIT_BYTES", 1 << 16)
        save(state, folder)


def every_copy(state: dict[str, Any], folder: Path) -> None:
    save(state, folder, planner=hpdcp.StandardSavePlanner(remove_redundancy=False))


WAYS: dict[str, Save] = {f.__name__: f for f in (save, async_save, in_waves, as_zarr, in_parts, every_copy)}


@pytest.mark.parametrize("cached", [False, True], ids=["planned", "cached"])
@pytest.mark.parametrize("way", WAYS)
def test_large_replicas_that_differ_are_refused(ranks: Job, folder: Path, way: str, cached: bool) -> None:
    def state(*, odd: bool) -> dict[str, Any]:
        names = {"experts.0": 1.0, "experts.1": 2.0, "same": 3.0}
        made: dict[str, Any] = {name: torch.full((LARGE,), value) for name, value in names.items()}
        if odd and ranks.rank == 2:
            made["experts.1"] += 1
        return made

    if cached:
        WAYS[way](state(odd=False), folder / "first")
    errors = ranks.errors(lambda: WAYS[way](state(odd=True), folder / "second"))
    assert [type(error) for error in errors] == [ReplicaMismatchError] * RANKS, errors
    assert "'experts.1' (rank" in str(errors[0])
    assert "rank 2" in str(errors[0])
    assert "'experts.0'" not in str(errors[0])
    assert "'same'" not in str(errors[0])
    ranks.barrier()
    assert not (folder / "second" / ".metadata").exists()
    ranks.barrier()
    WAYS[way](state(odd=False), folder / "third")
    target = {"experts.1": torch.zeros(LARGE)}
    hpdcp.load(target, checkpoint_id=folder / "third")
    assert torch.equal(target["experts.1"], torch.full((LARGE,), 2.0))
    ranks.barrier()


def test_a_shard_that_two_ranks_hold_alike_is_compared_too(ranks: Job, folder: Path) -> None:
    rows = (0, LARGE) if ranks.rank == 0 else (LARGE, LARGE)

    def state(value: float) -> dict[str, Any]:
        shard = torch.full((LARGE,), value)
        setattr(shard, CHUNK_INFO, ChunkInfo(ChunkStorageMetadata((rows[0],), (rows[1],)), (2 * LARGE,), []))
        return {"w": shard}

    save(state(1.0), folder / "equal")
    errors = ranks.errors(lambda: save(state(float(ranks.rank)), folder / "other"))
    assert [type(error) for error in errors] == [ReplicaMismatchError] * RANKS
    assert "'w' (rank 2 from rank 1)" in str(errors[0])


@pytest.mark.parametrize("way", WAYS)
def test_of_names_that_may_differ_rank_0s_is_stored(ranks: Job, folder: Path, way: str) -> None:
    with config.using(check_replicas={"bn.*": "off"}):
        for turn in range(3):
            value = 10.0 * turn + ranks.rank
            state = {
                "bn.mean": torch.full((LARGE,), value),
                "bn.count": torch.tensor(value),
                "w": torch.full((LARGE,), 5.0 + turn),
            }
            WAYS[way](state, folder / str(turn))
            ranks.barrier()
            target = {"bn.mean": torch.zeros(LARGE), "bn.count": torch.zeros(()), "w": torch.zeros(LARGE)}
            hpdcp.load(target, checkpoint_id=folder / str(turn))
            assert torch.equal(target["bn.mean"], torch.full((LARGE,), 10.0 * turn))
            assert target["bn.count"].item() == 10.0 * turn
            assert torch.equal(target["w"], torch.full((LARGE,), 5.0 + turn))
            ranks.barrier()


def test_rules_changed_between_two_saves_make_another_plan(ranks: Job, folder: Path) -> None:
    state = {"w": torch.full((LARGE,), float(ranks.rank))}
    with config.using(check_replicas="off"):
        save(state, folder / "off")
    errors = ranks.errors(lambda: save(state, folder / "sample"))
    assert [type(error) for error in errors] == [ReplicaMismatchError] * RANKS
    with config.using(check_replicas={"w": "off"}):
        save(state, folder / "exempt")
    target = {"w": torch.ones(LARGE)}
    hpdcp.load(target, checkpoint_id=folder / "exempt")
    assert torch.equal(target["w"], torch.zeros(LARGE))
    errors = ranks.errors(lambda: save(state, folder / "again"))
    assert [type(error) for error in errors] == [ReplicaMismatchError] * RANKS
    ranks.barrier()


def test_every_way_of_saving_after_every_other_is_as_if_it_were_the_first(ranks: Job, folder: Path) -> None:
    state = {"w": torch.arange(600.0).reshape(20, 30), "v": torch.ones(50), f"own{ranks.rank}": torch.ones(7), "n": [1]}
    fresh = {}
    for name in VARIANTS:
        PLANS.clear()
        fresh[name] = save_as(name, state, folder / "fresh" / name)
    PLANS.clear()
    for turn, name in enumerate(walk_all_pairs(list(VARIANTS))):
        assert save_as(name, state, folder / str(turn)) == fresh[name], name
    ranks.barrier()


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_only_some_ranks_tie_is_compared_and_stored(ranks: Job, folder: Path, way: str) -> None:
    def state(tied: tuple[int, ...], odd: int | None = None) -> dict[str, Any]:
        mine = torch.full((LARGE,), 1.0)
        other = mine if ranks.rank in tied else torch.full((LARGE,), 2.0 if ranks.rank == odd else 1.0)
        # Who writes it depends on what else each has to write.
        return {"a": mine, "b": other, f"own{ranks.rank}": torch.ones(LARGE * (3 if ranks.rank in tied else 1))}

    for number, tied in enumerate([(0,), (1, 2), (0,), (0,)]):
        WAYS[way](state(tied), folder / str(number))
        ranks.barrier()
        target = {"b": torch.zeros(LARGE)}
        hpdcp.load(target, checkpoint_id=folder / str(number))
        assert bool((target["b"] == 1).all())
    for tied, odd in (((0,), 1), ((1, 2), 0), ((0, 1), 2)):
        errors = ranks.errors(functools.partial(WAYS[way], state(tied, odd), folder / f"odd{odd}"))
        assert [type(error) for error in errors] == [ReplicaMismatchError] * RANKS, errors
        assert "'b' (rank" in str(errors[0]) and "'a'" not in str(errors[0])
