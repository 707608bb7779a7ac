"""The second save of a structure plans nothing; whatever changes on whichever rank, all ranks plan again together."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, Metadata, PerRank, StandardSavePlanner
from hpdcp._base import config
from hpdcp._base.errors import InvalidArgumentError, ReplicaMismatchError, StorageError
from hpdcp._plan import replicas
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.save_plan import SavePlan, WriteItem
from hpdcp_backends.local import LocalBackend
from tests.support.job import Job
from tests.support.layouts import (
    DP2_TP2_COLUMNS,
    FSDP4,
    HSDP,
    REPLICATED,
    TP4,
    TP4_COLUMNS,
    Layout,
    differing,
    local_of,
)

RANKS = 4

Save = Callable[..., bool]
FULL = {"w": torch.arange(64.0).reshape(8, 8), "norm": torch.arange(8.0)}


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    PLANS.clear()
    yield
    PLANS.clear()


@pytest.fixture
def save(ranks: Job, folder: Path, caplog: pytest.LogCaptureFixture) -> Save:
    """Saves to a sub-folder; whether the plan came from the cache, on which all ranks must agree."""
    caplog.set_level(logging.INFO, logger="hpdcp")

    def run(state: Mapping[str, Any], name: str = "ckpt", **arguments: Any) -> bool:
        caplog.clear()
        hpdcp.save(state, checkpoint_id=folder / name, **arguments)
        hits = ranks.gather("Hit final plan and metadata cache." in caplog.messages)
        assert len(set(hits)) == 1, hits
        return bool(hits[0])

    return run


def state_of(job: Job, layout: Layout = HSDP, scale: float = 1.0) -> dict[str, Any]:
    return {
        "model": layout.place_all(job, {"w": FULL["w"] * scale}),
        "norm": FULL["norm"] * scale,
        "step": 9,
        "rng": PerRank(torch.full((4,), float(job.rank))),
    }


def loaded(job: Job, folder: Path) -> dict[str, Any]:
    target: dict[str, Any] = {
        "model": TP4.blank_all(job, {"w": FULL["w"]}),
        "norm": torch.full((8,), job.sentinel()),
        "step": None,
        "rng": PerRank(torch.full((4,), job.sentinel())),
    }
    hpdcp.load(target, checkpoint_id=folder)
    return target


def test_the_second_save_of_a_structure_hits_and_stores_the_new_values(ranks: Job, folder: Path, save: Save) -> None:
    assert not save(state_of(ranks), "1")
    assert save(state_of(ranks, scale=2.0), "2")
    target = loaded(ranks, folder / "2")
    assert differing(TP4.place_all(ranks, {"w": FULL["w"] * 2}), target["model"]) == []
    assert torch.equal(target["norm"], FULL["norm"] * 2)
    assert torch.equal(target["rng"].value, torch.full((4,), float(ranks.rank)))


def test_a_hit_calls_neither_planning_step_and_asks_only_for_what_the_rank_writes(ranks: Job, folder: Path) -> None:
    asked: list[str] = []

    class Watched(StandardSavePlanner):
        def cache_key(self) -> object:
            return ("watched", *standard_key(self))

        def build_local_plan(self) -> SavePlan:
            asked.append("local")
            return super().build_local_plan()

        def build_global_plan(self, plans: Any) -> Any:
            asked.append("global")
            return super().build_global_plan(plans)

        def get_tensor(self, item: WriteItem) -> torch.Tensor:
            asked.append(item.index.fqn)
            return super().get_tensor(item)

    def standard_key(planner: StandardSavePlanner) -> tuple[object, ...]:
        key = StandardSavePlanner.cache_key.__get__(planner)()
        assert isinstance(key, tuple)
        return key

    state = {f"t{number}": torch.full((10 + number,), 1.0) for number in range(8)}
    with config.using(check_replicas="off"):
        hpdcp.save(state, checkpoint_id=folder / "1", planner=Watched())
        assert "local" in asked
        asked.clear()
        hpdcp.save(state, checkpoint_id=folder / "2", planner=Watched())
    written = ranks.gather(sorted(asked))
    assert sorted(name for names in written for name in names) == sorted(state)
    assert all(written)


def test_model_and_optimizer_saved_separately_keep_separate_plans(ranks: Job, save: Save) -> None:
    model = TP4.place_all(ranks, {"w": FULL["w"]})
    optimizer = {"state": {0: {"exp_avg": TP4.place(ranks, FULL["w"]), "step": 3}}, "groups": [{"lr": 0.1}]}
    hits = [[save(model, f"model{turn}"), save(optimizer, f"optimizer{turn}")] for turn in range(3)]
    assert hits == [[False, False], [True, True], [True, True]]
    assert len(PLANS) == 2


def test_a_rank_that_holds_the_same_in_two_saves_finds_the_plan_of_either(ranks: Job, folder: Path, save: Save) -> None:
    """A pipeline stage may have no part in either; the plans that it keeps have one and the same key."""
    states = [{"w": torch.zeros(4)} if ranks.rank < 2 else {}, {"v": torch.ones(5)} if ranks.rank < 2 else {}]
    hits = [[save(state, f"{turn}{number}") for number, state in enumerate(states)] for turn in range(3)]
    assert hits == [[False, False], [True, True], [True, True]]
    for number, state in enumerate(states):
        target = {name: torch.full_like(tensor, ranks.sentinel()) for name, tensor in state.items()}
        hpdcp.load(target, checkpoint_id=folder / f"2{number}")
        assert all(torch.equal(target[name], tensor) for name, tensor in state.items())


def test_values_that_change_their_length_are_stored_in_full_on_a_hit(ranks: Job, folder: Path, save: Save) -> None:
    def state(turn: int) -> dict[str, Any]:
        return {"step": 10**turn, "seen": list(range(turn * 3)), "name": "x" * turn, "rank": PerRank(["r"] * turn * 2)}

    for turn in range(1, 5):
        assert save(state(turn), str(turn)) == (turn > 1)
        target = {"step": None, "seen": None, "name": None, "rank": PerRank(None)}
        hpdcp.load(target, checkpoint_id=folder / str(turn))
        target["rank"] = target["rank"].value
        assert target == {**state(turn), "rank": ["r"] * turn * 2}


def test_a_checkpoint_saved_over_itself_with_a_cached_plan_is_the_new_one(ranks: Job, folder: Path, save: Save) -> None:
    for turn in range(1, 4):
        assert save(state_of(ranks, scale=float(turn))) == (turn > 1)
        assert torch.equal(loaded(ranks, folder / "ckpt")["norm"], FULL["norm"] * turn)
    ranks.barrier()
    listed = Metadata.from_bytes((folder / "ckpt" / ".metadata").read_bytes(), where="it").files
    assert {path.name for path in (folder / "ckpt").iterdir()} == {".metadata", ".attempt", *listed}


def test_a_hit_publishes_what_planning_in_full_would(ranks: Job, folder: Path, save: Save) -> None:
    shapes = []
    for turn in range(4):
        state = {**state_of(ranks, TP4_COLUMNS), "tied": None, "seen": [0] * (5 * turn)}
        state["tied"] = state["norm"]
        planner = StandardSavePlanner(enable_plan_caching=turn < 3)
        assert save(state, str(turn), planner=planner) == (turn in (1, 2))
        metadata = Metadata.from_bytes((folder / str(turn) / ".metadata").read_bytes(), where=str(turn))
        shapes.append({**metadata.entries.to_columns(), **metadata.chunks.to_columns()})
    for columns in shapes[:-1]:
        assert columns.keys() == shapes[-1].keys()
        assert all(np.array_equal(columns[name], shapes[-1][name]) for name in columns)


def _on(rank: int, job: Job, yes: Any, no: Any) -> Any:
    return yes if job.rank == rank else no


def _with(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**state, **more}


def _tied(job: Job) -> dict[str, Any]:
    state = state_of(job)
    return {**state, "other": state["norm"]}


def _rows(job: Job, start: int) -> torch.Tensor:
    part = torch.zeros(2)
    first = (start + 2 * job.rank) % 8
    setattr(part, CHUNK_INFO, ChunkInfo(ChunkStorageMetadata((first,), (2,)), (8,)))
    return part


CHANGES: dict[str, tuple[Callable[[Job], dict[str, Any]], Callable[[Job], dict[str, Any]]]] = {
    "dtype": (state_of, lambda job: _with(state_of(job), norm=FULL["norm"].double())),
    "shape": (state_of, lambda job: _with(state_of(job), norm=torch.zeros(9))),
    "placements": (state_of, lambda job: state_of(job, DP2_TP2_COLUMNS)),
    "mesh": (state_of, lambda job: state_of(job, FSDP4)),
    "replicated instead": (lambda job: state_of(job, TP4), lambda job: state_of(job, REPLICATED)),
    "another tensor type": (state_of, lambda job: _with(state_of(job), norm=REPLICATED.place(job, FULL["norm"]))),
    "a tie": (lambda job: _with(state_of(job), other=FULL["norm"].clone()), _tied),
    "a new key": (state_of, lambda job: _with(state_of(job), extra=1)),
    "a key less": (state_of, lambda job: {key: value for key, value in state_of(job).items() if key != "step"}),
    "a key's type": (lambda job: {"a": {1: FULL["w"]}}, lambda job: {"a": {"1": FULL["w"]}}),
    "a value for a tensor": (state_of, lambda job: _with(state_of(job), norm=3)),
    "whose it is": (lambda job: {"a": 1.5}, lambda job: {"a": PerRank(1.5)}),
    "which rows": (lambda job: {"a": _rows(job, 0)}, lambda job: {"a": _rows(job, 2)}),
    "a new key on one rank": (state_of, lambda job: _with(state_of(job), **_on(3, job, {"extra": 1}, {}))),
    "a tie on one rank": (
        lambda job: _with(state_of(job), other=FULL["norm"].clone()),
        lambda job: _on(2, job, _tied(job), _with(state_of(job), other=FULL["norm"].clone())),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_that_a_plan_depends_on_makes_all_ranks_plan_again(ranks: Job, save: Save, change: str) -> None:
    before, after = CHANGES[change]
    assert not save(before(ranks), "before")
    assert not save(after(ranks), "after")
    assert save(after(ranks), "after again")
    assert save(before(ranks), "before again")


def test_another_option_of_the_planner_is_another_plan(ranks: Job, folder: Path, save: Save) -> None:
    state = state_of(ranks)
    planners: list[Callable[[], StandardSavePlanner]] = [
        StandardSavePlanner,
        lambda: StandardSavePlanner(remove_redundancy=False),
        lambda: StandardSavePlanner(save_to_minimum_rank=True),
    ]
    for number, planner in enumerate(planners):
        assert not save(state, f"{number}", planner=planner())
        assert save(state, f"{number} again", planner=planner())
    for name in ("2", "2 again"):
        metadata = Metadata.from_bytes((folder / name / ".metadata").read_bytes(), where=name)
        row = metadata.find("norm")
        assert row is not None
        assert metadata.storage_info(metadata.chunk_rows(row)[0]).key.startswith("_rank0_")


def test_caching_can_be_switched_off_and_is_off_without_collectives(ranks: Job, save: Save) -> None:
    for turn in range(2):
        assert not save(state_of(ranks), f"{turn}", planner=StandardSavePlanner(enable_plan_caching=False))
        assert not save(state_of(ranks), f"apart{turn}", use_collectives=False)
    assert len(PLANS) == 0


def test_ragged_shards_are_planned_every_time(ranks: Job, save: Save) -> None:
    ragged = Layout("ragged", (4,), units=(1, 3, 0, 4))
    for turn in range(2):
        assert not save({"w": ragged.place(ranks, FULL["w"])}, f"{turn}")
    assert len(PLANS) == 0


def test_a_rank_that_alone_lacks_the_plan_makes_all_plan_again(ranks: Job, folder: Path, save: Save) -> None:
    for lacking in range(ranks.world_size):
        save(state_of(ranks), "first")
        if ranks.rank == lacking:
            PLANS.clear()
        assert not save(state_of(ranks, scale=3.0), "second")
        assert torch.equal(loaded(ranks, folder / "second")["norm"], FULL["norm"] * 3)
        assert save(state_of(ranks), "third")


def test_plans_of_different_saves_are_never_mixed(ranks: Job, save: Save) -> None:
    """Every rank has a plan for its key, but not all from the same save."""
    state = state_of(ranks)
    save(state, "first")
    kept = dict(PLANS._plans)
    PLANS.clear()
    save(state, "second")
    if ranks.rank == 1:
        PLANS.clear()
        PLANS._plans.update(kept)
    assert not save(state, "third")
    assert save(state, "fourth")


@pytest.mark.parametrize("cached", [False, True], ids=["planned", "cached"])
def test_a_failed_save_leaves_nothing_in_the_cache(
    ranks: Job, folder: Path, save: Save, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cached:
        save(state_of(ranks), "first")

    def fails(self: LocalBackend, *arguments: Any, **options: Any) -> None:
        raise StorageError("this rank's disk is full.")

    with monkeypatch.context() as patch:
        if ranks.rank == 2:
            patch.setattr(LocalBackend, "write", fails)
        errors = ranks.errors(lambda: hpdcp.save(state_of(ranks, scale=5.0), checkpoint_id=folder / "broken"))
    assert [type(error) for error in errors] == [StorageError] * 4
    assert len(PLANS) == (1 if cached else 0)
    ranks.barrier()
    assert not (folder / "broken" / ".metadata").exists()
    assert save(state_of(ranks, scale=7.0), "after") == cached
    assert torch.equal(loaded(ranks, folder / "after")["norm"], FULL["norm"] * 7)


def test_ranks_that_name_different_places_are_told_so_although_all_have_the_plan(
    ranks: Job, folder: Path, save: Save
) -> None:
    save(state_of(ranks), "same")
    elsewhere = folder / ("here" if ranks.rank != 3 else "there")
    errors = ranks.errors(lambda: hpdcp.save(state_of(ranks), checkpoint_id=elsewhere))
    assert [type(error) for error in errors] == [InvalidArgumentError] * 4
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "different locations" in str(errors[0])


def test_one_rank_that_fails_before_the_vote_fails_all(ranks: Job, folder: Path, save: Save) -> None:
    save(state_of(ranks), "first")

    class Broken(StandardSavePlanner):
        def cache_key(self) -> object:
            raise RuntimeError("no key today")

    planner = Broken() if ranks.rank == 1 else StandardSavePlanner()
    errors = ranks.errors(lambda: hpdcp.save(state_of(ranks), checkpoint_id=folder / "second", planner=planner))
    assert len({str(error) for error in errors}) == 1
    assert "rank 1" in str(errors[0])
    assert "no key today" in str(errors[0])
    assert save(state_of(ranks), "third")


@pytest.mark.parametrize("cached", [False, True], ids=["planned", "cached"])
def test_buffers_that_were_never_synchronised_are_found(ranks: Job, folder: Path, save: Save, cached: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    if cached:
        save({"model": model.state_dict()}, "first")
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(ranks.rank)))
    errors = ranks.errors(lambda: hpdcp.save({"model": model.state_dict()}, checkpoint_id=folder / "second"))
    assert [type(error) for error in errors] == [ReplicaMismatchError] * 4
    assert "'model.1.running_mean'" in str(errors[0])
    assert "'model.1.running_var'" in str(errors[0])
    assert "num_batches_tracked" not in str(errors[0])
    assert "PerRank" in str(errors[0])
    ranks.barrier()
    assert not (folder / "second" / ".metadata").exists()


def test_random_state_without_per_rank_is_found_and_with_it_is_fine(ranks: Job, folder: Path, save: Save) -> None:
    state = torch.Generator().manual_seed(ranks.rank).get_state()
    errors = ranks.errors(lambda: hpdcp.save({"rng": state}, checkpoint_id=folder / "bare"))
    assert [type(error) for error in errors] == [ReplicaMismatchError] * 4
    assert "'rng'" in str(errors[0])
    save({"rng": PerRank(state)}, "marked")
    target = {"rng": PerRank(torch.zeros_like(state))}
    hpdcp.load(target, checkpoint_id=folder / "marked")
    assert torch.equal(target["rng"].value, state)


@pytest.mark.parametrize("cached", [False, True], ids=["planned", "cached"])
def test_a_large_replica_is_written_in_parts_and_loads_back(
    ranks: Job, folder: Path, save: Save, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SPLIT_BYTES", 1 << 10)
    full = torch.arange(1001.0 * 8).reshape(1, 1001, 8)
    for turn in range(1 + cached):
        with config.using(check_replicas="all"):
            assert save({"embedding": full, "step": turn}, "ckpt") == (turn > 0)
    metadata = Metadata.from_bytes((folder / "ckpt" / ".metadata").read_bytes(), where="it")
    row = metadata.find("embedding")
    assert row is not None
    parts = [metadata.storage_info(chunk) for chunk in metadata.chunk_rows(row)]
    assert {info.key.split("_")[1].split(".")[0] for info in parts} == {"rank0", "rank1", "rank2", "rank3"}
    assert max(info.length for info in parts) - min(info.length for info in parts) <= 8 * 4
    target = {"embedding": torch.full_like(full, ranks.sentinel())}
    hpdcp.load(target, checkpoint_id=folder / "ckpt")
    assert torch.equal(target["embedding"], full)
    shard = TP4_COLUMNS.blank_all(ranks, {"embedding": full})
    hpdcp.load(shard, checkpoint_id=folder / "ckpt")
    assert differing(TP4_COLUMNS.place_all(ranks, {"embedding": full}), shard) == []
    ranks.barrier()


@pytest.mark.parametrize("element", [0, 3000, 8007], ids=["first part", "a middle part", "last part"])
def test_a_rank_that_differs_in_a_part_that_another_writes_is_found(
    ranks: Job, folder: Path, save: Save, element: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SPLIT_BYTES", 1 << 10)
    full = torch.arange(1001.0 * 8).reshape(1001, 8)
    odd = element % 4
    if ranks.rank == odd:
        full.view(-1)[element] = -1.0
    with config.using(check_replicas="all"):
        errors = ranks.errors(lambda: hpdcp.save({"embedding": full}, checkpoint_id=folder / "ckpt"))
    assert [type(error) for error in errors] == [ReplicaMismatchError] * 4
    others = ", ".join(str(rank) for rank in range(4) if rank != odd)
    named = rf"ranks {others} from rank 0" if odd == 0 else rf"rank {odd} from rank 0"
    assert re.search(rf"'embedding' \({named}\)", str(errors[0])), errors[0]


def test_the_same_tensors_in_new_memory_hit(ranks: Job, save: Save) -> None:
    """An optimizer may replace its tensors between saves; where they lie is no part of the plan."""
    state = state_of(ranks)
    save(state, "1")
    again = {"model": {"w": state["model"]["w"] + 0}, "norm": state["norm"].clone(), "step": 11, "rng": state["rng"]}
    assert isinstance(again["model"]["w"], DTensor)
    assert again["model"]["w"].placements[-1] == Shard(0)
    assert local_of(again["model"]["w"]).data_ptr() != local_of(state["model"]["w"]).data_ptr()
    assert save(again, "2")
