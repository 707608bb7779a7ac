"""What a rank keeps of an earlier plan, and what makes two state dicts the same to it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, PerRank, StandardSavePlanner
from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._comm.exchange import Alone
from hpdcp._plan import standard_save_planner
from hpdcp._plan._fingerprint import fingerprint
from hpdcp._plan.plan_cache import PLANS, CachedPlan, PlanCache
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.save_plan import SavePlan
from hpdcp._state.sharding import LocalShards, local_shards
from hpdcp._state.tensor_columns import TensorColumns, tensor_columns
from hpdcp._state.tree import Leaf, walk


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    PLANS.clear()
    yield
    PLANS.clear()


def cached(number: int) -> CachedPlan:
    return CachedPlan(number, b"local", b"part", None)


def walked(state: Mapping[str, Any], rank: int = 0) -> tuple[list[Leaf], TensorColumns]:
    leaves = walk(state, rank=rank)
    return leaves, tensor_columns([leaf.value for leaf in leaves])


def print_of(state: Mapping[str, Any], rank: int = 0) -> bytes | None:
    leaves, tensors = walked(state, rank)
    return fingerprint(leaves, tensors, standard_save_planner.tied_names(leaves, tensors))


class TestTheCache:
    def test_it_finds_what_was_put_and_nothing_under_another_key(self) -> None:
        plans = PlanCache()
        plans.put("a", cached(1))
        assert plans.find("a") == [cached(1)]
        assert plans.find("b") == []

    def test_a_key_may_have_several_plans_and_the_last_used_comes_first(self) -> None:
        plans = PlanCache()
        plans.put("a", cached(1))
        plans.put("a", cached(2))
        assert [plan.plan_id for plan in plans.find("a")] == [2, 1]
        plans.put("a", cached(1))
        assert [plan.plan_id for plan in plans.find("a")] == [1, 2]

    def test_the_one_not_used_for_longest_goes_and_never_the_one_just_put(self) -> None:
        plans = PlanCache(most=2)
        plans.put("a", cached(1))
        plans.put("b", cached(2))
        plans.put("a", cached(1))
        plans.put("c", cached(3))
        assert [bool(plans.find(key)) for key in "abc"] == [True, False, True]
        assert len(plans) == 2

    def test_clear_forgets_everything(self) -> None:
        plans = PlanCache()
        plans.put("a", cached(1))
        plans.clear()
        assert plans.find("a") == []
        assert len(plans) == 0

    def test_a_plan_is_bytes_that_another_process_can_be_sent(self, tmp_path: Path) -> None:
        hpdcp.save({"w": torch.ones(3), "step": 9, "rng": PerRank(3)}, checkpoint_id=tmp_path)
        ((key, kept),) = ((key, plan) for (key, _), plan in PLANS._plans.items())
        assert pickle.loads(pickle.dumps((key, kept))) == (key, kept)
        assert str(tmp_path).encode() not in kept.local + kept.part + (kept.whole or b"")
        local = SavePlan.from_bytes(kept.local)
        lengths = {local.item(row).index.fqn: local.item(row).nbytes for row in range(len(local))}
        assert lengths == {"w": 12, "step": -1, "rng": -1}


class Point(NamedTuple):
    x: Any
    y: Any


class TestTheFingerprint:
    BASE: Mapping[str, Any] = {
        "model": {"w": torch.zeros(4, 2), "b": torch.zeros(4)},
        "pair": (torch.zeros(2), 5),
        "rng": PerRank([1, 2]),
        "step": 3,
    }

    def test_values_memory_and_the_lengths_of_objects_do_not_count(self) -> None:
        other = {
            "model": {"w": torch.ones(4, 2), "b": torch.nn.Parameter(torch.ones(4))},
            "pair": (torch.ones(2, requires_grad=True), 50000),
            "rng": PerRank("something else entirely"),
            "step": [1] * 100,
        }
        assert print_of(self.BASE) == print_of(other) is not None

    def test_strides_and_devices_of_the_same_box_do_not_count(self) -> None:
        assert print_of({"w": torch.zeros(3, 5)}) == print_of({"w": torch.zeros(5, 3).t()})

    @pytest.mark.parametrize(
        "change",
        [
            lambda base: {**base, "model": {**base["model"], "w": torch.zeros(2, 4)}},
            lambda base: {**base, "model": {**base["model"], "w": torch.zeros(4, 2, dtype=torch.float16)}},
            lambda base: {**base, "model": {**base["model"], "c": torch.zeros(4)}},
            lambda base: {**base, "model": dict(reversed(base["model"].items()))},
            lambda base: {**base, "model": {**base["model"], "b": base["model"]["w"][:, 0].contiguous(), 1: 2}},
            lambda base: {**base, "pair": [*base["pair"]]},
            lambda base: {**base, "pair": Point(*base["pair"])},
            lambda base: {**base, "pair": {0: base["pair"][0], 1: 5}},
            lambda base: {**base, "pair": {"0": base["pair"][0], "1": 5}},
            lambda base: {**base, "pair": {False: base["pair"][0], 1: 5}},
            lambda base: {**base, "rng": [1, 2]},
            lambda base: {**base, "step": torch.zeros(())},
            lambda base: {**base, "step": PerRank(3)},
        ],
    )
    def test_names_types_shapes_dtypes_and_owners_count(self, change: Callable[[Any], Any]) -> None:
        assert print_of(self.BASE) != print_of(change(self.BASE))

    def test_what_is_tied_counts(self) -> None:
        weight = torch.zeros(4)
        apart = {"a": weight, "b": torch.zeros(4), "c": torch.zeros(4)}
        first = {"a": weight, "b": weight, "c": torch.zeros(4)}
        last = {"a": weight, "b": torch.zeros(4), "c": weight}
        assert len({print_of(apart), print_of(first), print_of(last)}) == 3
        other = torch.ones(4)
        assert print_of(first) == print_of({"a": other, "b": other, "c": torch.ones(4)})

    def test_views_that_only_start_alike_are_not_tied(self) -> None:
        whole = torch.zeros(8)
        assert standard_save_planner.tied_names(*walked({"a": whole, "b": whole[:4], "c": whole.view(2, 4)})) == {}

    def test_tensors_without_elements_are_not_tied(self) -> None:
        assert standard_save_planner.tied_names(*walked({"a": torch.zeros(0), "b": torch.zeros(0)})) == {}

    def test_the_box_of_a_plain_tensor_counts(self) -> None:
        def rows(start: int, total: int) -> dict[str, torch.Tensor]:
            part = torch.zeros(2)
            setattr(part, CHUNK_INFO, ChunkInfo(ChunkStorageMetadata((start,), (2,)), (total,)))
            return {"a": part}

        prints = {print_of(rows(0, 8)), print_of(rows(2, 8)), print_of(rows(0, 9)), print_of({"a": torch.zeros(2)})}
        assert len(prints) == 4
        assert None not in prints

    @pytest.mark.parametrize(
        "value",
        [
            torch.zeros(2, device="meta"),
            torch.zeros(2, 2).to_sparse(),
            torch.nn.UninitializedParameter(),
        ],
        ids=["meta", "sparse", "lazy"],
    )
    def test_what_cannot_be_stored_has_none_so_that_planning_refuses_it(self, value: object, tmp_path: Path) -> None:
        assert print_of({"a": value}) is None
        with pytest.raises(UnsupportedTypeError, match="a"):
            hpdcp.save({"a": value}, checkpoint_id=tmp_path)
        assert len(PLANS) == 0

    def test_keys_that_only_the_path_s_text_knows_have_one_too(self) -> None:
        one, two = ({torch.float32: torch.zeros(2), "b": 1}, {torch.float16: torch.zeros(2), "b": 1})
        assert print_of({"x": one}) is not None  # type: ignore[dict-item]
        assert print_of({"x": one}) != print_of({"x": two})  # type: ignore[dict-item]


class TestThePlanner:
    CONTEXT = PlannerContext(rank=1, world_size=4, is_coordinator=False, collective=True)
    STATE: Mapping[str, Any] = {"w": torch.arange(6.0).reshape(2, 3), "step": 9, "seen": [1, 2]}

    def configured(self, planner: StandardSavePlanner, context: PlannerContext = CONTEXT) -> StandardSavePlanner:
        planner.configure_planner(self.STATE, context)
        return planner

    def test_rank_world_and_options_are_part_of_the_key(self) -> None:
        keys = [
            self.configured(StandardSavePlanner()).cache_key(),
            self.configured(StandardSavePlanner(remove_redundancy=False)).cache_key(),
            self.configured(StandardSavePlanner(save_to_minimum_rank=True)).cache_key(),
            self.configured(StandardSavePlanner(), PlannerContext(2, 4, False, True)).cache_key(),
            self.configured(StandardSavePlanner(), PlannerContext(1, 5, False, True)).cache_key(),
        ]
        assert None not in keys
        assert len(set(keys)) == len(keys)
        assert self.configured(StandardSavePlanner()).cache_key() == keys[0]

    def test_there_is_no_key_without_collectives_or_when_switched_off(self) -> None:
        apart = PlannerContext(rank=1, world_size=4, is_coordinator=True, collective=False)
        assert self.configured(StandardSavePlanner(), apart).cache_key() is None
        assert self.configured(StandardSavePlanner(enable_plan_caching=False)).cache_key() is None

    def test_a_subclass_has_a_key_only_once_it_says_so_itself(self) -> None:
        class Adds(StandardSavePlanner):
            def build_local_plan(self) -> SavePlan:
                return super().build_local_plan()

        class Says(Adds):
            def cache_key(self) -> object:
                return ("says", super().cache_key())

        assert self.configured(Adds()).cache_key() is None
        key = self.configured(Says()).cache_key()
        assert isinstance(key, tuple)
        assert key[1] is not None

    def test_lengths_that_are_not_known_are_filled_in_at_the_end(self) -> None:
        plan = self.configured(StandardSavePlanner()).build_local_plan()
        planner = StandardSavePlanner()
        planner.configure_planner({**self.STATE, "step": 123456, "seen": [1] * 50}, self.CONTEXT)
        final = planner.finalize_plan(plan.without_object_lengths())
        assert [item.nbytes for item in final.items] == [24, 6, len(planner.get_bytes(final.item(2)))]
        assert final.item(2).nbytes > plan.item(2).nbytes
        assert planner.finalize_plan(plan) is plan

    def test_only_what_is_asked_for_is_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = self.configured(StandardSavePlanner()).build_local_plan()
        looked: list[str] = []

        def watched(tensor: torch.Tensor, *, key: str) -> LocalShards:
            looked.append(key)
            return local_shards(tensor, key=key)

        monkeypatch.setattr(standard_save_planner, "local_shards", watched)
        planner = StandardSavePlanner()
        planner.configure_planner({**self.STATE, "v": torch.zeros(3)}, self.CONTEXT)
        planner.cache_key()
        assert looked == []
        assert torch.equal(planner.get_tensor(plan.item(0)), self.STATE["w"])
        assert looked == ["w"]


def test_alone_a_vote_is_its_own_least_and_greatest() -> None:
    assert Alone().min_max("voting", 3, lambda: (1, 7, (1 << 63) - 1)) == ([1, 7, (1 << 63) - 1],) * 2


def test_a_process_by_itself_uses_its_plans_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hpdcp")
    for turn in range(3):
        state = {"w": torch.full((4,), float(turn)), "step": 10**turn, "seen": ["x"] * turn}
        caplog.clear()
        hpdcp.save(state, checkpoint_id=tmp_path)
        assert ("Hit final plan and metadata cache." in caplog.messages) == (turn > 0)
        target = {"w": torch.zeros(4), "step": None, "seen": None}
        hpdcp.load(target, checkpoint_id=tmp_path)
        assert torch.equal(target.pop("w"), state.pop("w"))  # type: ignore[arg-type]
        assert target == state


def test_each_layout_has_plans_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hpdcp")
    hits = []
    for turn, layout in enumerate(["safetensors", "zarr", "zarr", "safetensors"]):
        caplog.clear()
        writer = hpdcp.FileSystemWriter(tmp_path / str(turn), layout=layout)
        hpdcp.save({"w": torch.full((3,), float(turn))}, storage_writer=writer)
        target = {"w": torch.zeros(3)}
        hpdcp.load(target, checkpoint_id=tmp_path / str(turn))
        assert target["w"].tolist() == [turn] * 3
        hits.append("Hit final plan and metadata cache." in caplog.messages)
    assert hits == [False, False, True, True]


def test_a_writer_that_changes_plans_is_given_a_new_one_every_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Turns(hpdcp.FileSystemWriter):
        def optimize_local_plan(self, plan: SavePlan) -> SavePlan:
            return super().optimize_local_plan(plan.select(np.arange(len(plan))[::-1]))

    caplog.set_level("INFO", logger="hpdcp")
    for turn in range(2):
        hpdcp.save({"a": torch.zeros(2), "b": torch.ones(2)}, storage_writer=Turns(tmp_path / str(turn)))
        target = {"a": torch.full((2,), 9.0), "b": torch.full((2,), 9.0)}
        hpdcp.load(target, checkpoint_id=tmp_path / str(turn))
        assert target["a"].tolist() == [0, 0]
        assert target["b"].tolist() == [1, 1]
    assert "Hit final plan and metadata cache." not in caplog.messages
    assert len(PLANS) == 0


def test_a_writer_that_changes_its_mind_on_a_hit_has_everything_planned_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Moody(hpdcp.FileSystemWriter):
        turns = False

        def optimize_global_plan(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
            told = super().optimize_global_plan(plans)
            return [plan.select(np.arange(len(plan))[::-1]) for plan in told] if self.turns else told

    caplog.set_level("INFO", logger="hpdcp")
    state = {"a": torch.zeros(2), "b": torch.ones(2), "step": 3}
    hits = []
    for turns in (False, False, True, False):
        caplog.clear()
        writer = Moody(tmp_path)
        writer.turns = turns
        hpdcp.save(state, storage_writer=writer)
        target = {"a": torch.full((2,), 9.0), "b": torch.full((2,), 9.0), "step": 0}
        hpdcp.load(target, checkpoint_id=tmp_path)
        assert [target["a"].tolist(), target["b"].tolist(), target["step"]] == [[0, 0], [1, 1], 3]
        hits.append("Hit final plan and metadata cache." in caplog.messages)
    assert hits == [False, True, False, True]


def test_a_part_travels_as_row_numbers_where_it_is_a_selection() -> None:
    planner = StandardSavePlanner()
    planner.configure_planner({f"t{i}": torch.zeros(3, 4) for i in range(50)}, TestThePlanner.CONTEXT)
    local = planner.build_local_plan()
    part = local.select(np.array([3, 1, 40])).with_storage_data({"attempt": "a"})
    data = part.to_part(local)
    assert len(data) < 500 < len(part.to_bytes())
    again = SavePlan.from_part(data, local)
    assert list(again.items) == list(part.items)
    assert again.storage_data == {"attempt": "a"}
    rows = again.rows_in(local)
    assert rows is not None
    assert rows.tolist() == [3, 1, 40]
    rebuilt = SavePlan(local.entries, part.chunks, part.nbytes)
    assert list(SavePlan.from_part(rebuilt.to_part(local), local).items) == list(part.items)
    strange = SavePlan.from_bytes(part.to_bytes())
    assert list(SavePlan.from_part(strange.to_part(local), local).items) == list(part.items)
    twice = local.select(np.arange(50)[::-1]).select(np.array([0]))
    assert twice.rows_in(local) is None
    assert SavePlan.from_part(twice.to_part(local), local).item(0).index.fqn == "t49"
