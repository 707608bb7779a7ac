"""What several ranks hold is compared at every size, by samples of what is large, whoever writes it in which boxes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hpdcp import StandardSavePlanner
from hpdcp._base.config import ReplicaCheck
from hpdcp._base.errors import ReplicaMismatchError, StateDictError
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._engine._replica_checksums import replica_report
from hpdcp._format.checksums import block_checksums
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import PerRank, StorageInfo
from hpdcp._plan import replicas
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.replica_checks import ReplicaReport, boxes_to_compare, check_replicas
from hpdcp._plan.replica_rules import ReplicaRules
from hpdcp._plan.replicas import drop_duplicates
from hpdcp._plan.samples import SAMPLE_BYTES
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.whole_plan import WholePlan, join_results
from hpdcp._plan.write_results import FileRecord, WriteResult, WriteResults

Setting = ReplicaCheck | Mapping[str, ReplicaCheck]


def compare(states: Sequence[dict[str, Any]], setting: Setting = "sample", **options: bool) -> list[list[str]]:
    """Save these states, one of each rank, without storing anything; which names each rank sends checksums of."""
    rules = ReplicaRules(setting)
    planners = [StandardSavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.configure_planner(state, PlannerContext(rank, len(states), rank == 0, True))
    locals_ = [planner.build_local_plan() for planner in planners]
    how = {"remove_redundancy": True, "to_minimum_rank": False} | options
    written, metadata = drop_duplicates(locals_, may_differ=rules.exempt, **how)
    whole = WholePlan.of(metadata, written, locals_)
    parts = [
        part.with_compared(boxes).to_part(local)
        for part, boxes, local in zip(written, boxes_to_compare(whole, locals_, rules), locals_, strict=True)
    ]
    whole = WholePlan.from_bytes(whole.without_object_lengths().to_bytes())
    results, reports = [], []
    for rank, (planner, local) in enumerate(zip(planners, locals_, strict=True)):
        part = SavePlan.from_part(parts[rank], local)
        infos = [stored(planner, part, row, f"f{rank}") for row in range(len(part))]
        results.append(WriteResults.build(infos, [FileRecord(f"f{rank}", 1 << 40, 0)] if infos else []))
        reports.append(ReplicaReport.from_bytes(replica_report(planner, local, part.compared).to_bytes()))
    check_replicas(whole, join_results(whole, results).as_items().table, reports, rules)
    return [
        sorted({local.item(row).index.fqn for row in report.rows.tolist()})
        for local, report in zip(locals_, reports, strict=True)
    ]


def stored(planner: StandardSavePlanner, part: SavePlan, row: int, key: str) -> WriteResult:
    item = part.item(row)
    is_object = item.kind is EntryKind.OBJECT
    pieces = [memoryview(planner.get_bytes(item))] if is_object else byte_pieces(planner.get_tensor(item))
    return WriteResult(StorageInfo(key, 0, item.nbytes, tuple(block_checksums(pieces))))


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SPLIT_BYTES", 1000)


SIZES = [1, 3, SAMPLE_BYTES // 4, SAMPLE_BYTES // 4 + 1, 1 << 20]


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("setting", ["sample", "all", {"*": "all"}, {"other.*": "off"}])
@pytest.mark.parametrize("odd", range(3))
def test_replicas_that_differ_are_refused_at_every_size(elements: int, setting: Setting, odd: int) -> None:
    states = [{"w": torch.ones(elements), "same": torch.zeros(elements)} for _ in range(3)]
    compare(states, setting)
    states[odd]["w"] = torch.randn(elements)
    with pytest.raises(ReplicaMismatchError, match=r"1 key is .* 'w' \(.*PerRank") as caught:
        compare(states, setting)
    assert "'same'" not in str(caught.value)


@pytest.mark.parametrize("setting", ["sample", "all"])
@pytest.mark.parametrize("options", [{}, {"to_minimum_rank": True}, {"remove_redundancy": False}])
@pytest.mark.usefixtures("many_parts")
def test_whoever_writes_them_in_however_many_parts(setting: ReplicaCheck, options: dict[str, bool]) -> None:
    for odd in range(4):
        states = [{"big": torch.ones(90_000, 3), "small": torch.ones(5), "own": PerRank(rank)} for rank in range(4)]
        compare(states, setting, **options)
        states[odd]["small"] = torch.zeros(5)
        with pytest.raises(ReplicaMismatchError, match="'small'"):
            compare(states, setting, **options)
        states[odd] |= {"small": torch.ones(5), "big": torch.ones(90_000, 3) * 2}
        with pytest.raises(ReplicaMismatchError, match="'big'"):
            compare(states, setting, **options)


@pytest.mark.parametrize("setting", ["off", {"*": "off"}, {"*": "all", "w*": "sample", "w": "off"}])
def test_what_is_exempt_is_not_compared(setting: Setting) -> None:
    states = [{"w": torch.full((100_000,), float(rank))} for rank in range(2)]
    assert compare(states, setting) == [[], []]


def test_of_names_that_may_differ_the_lowest_holder_writes_its_own_in_one_box(many_parts: None) -> None:
    states: list[dict[str, Any]] = [{"a": torch.ones(50_000)} for _ in range(3)]
    for rank in (1, 2):
        states[rank] |= {"bn.mean": torch.full((4000,), float(rank)), "bn.n": rank, "c": torch.ones(4000)}
    compare(states, {"bn.*": "off"})
    planners = [StandardSavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.configure_planner(state, PlannerContext(rank, 3, rank == 0, True))
    for redundancy, lowest in itertools.product([True, False], [True, False]):
        written, _ = drop_duplicates(
            [planner.build_local_plan() for planner in planners],
            remove_redundancy=redundancy,
            to_minimum_rank=lowest,
            may_differ=ReplicaRules({"bn.*": "off"}).exempt,
        )
        names = [sorted(item.index.fqn for item in part.items if item.index.fqn.startswith("bn")) for part in written]
        assert names == [[], ["bn.mean", "bn.n"], []]


def test_nobody_sends_checksums_of_what_no_other_rank_holds() -> None:
    states: list[dict[str, Any]] = [{f"w{rank}": torch.ones(100_000), f"n{rank}": [rank]} for rank in range(3)]
    assert compare(states, "all") == [[], [], []]


def test_the_writer_of_small_ones_is_not_asked_for_what_the_write_says() -> None:
    states = [{f"w{number}": torch.ones(100) for number in range(4)} for _ in range(2)]
    found = compare(states)
    assert sorted(itertools.chain(*found)) == ["w0", "w1", "w2", "w3"]


@pytest.mark.parametrize("elements", [10, 100_000])
def test_a_name_tied_on_the_rank_that_writes_it_is_compared_in_full(elements: int) -> None:
    shared = torch.ones(elements)
    states = [{"a": shared, "b": shared}, {"a": torch.ones(elements), "b": torch.ones(elements)}]
    compare(states, to_minimum_rank=True)
    states[1]["b"][elements // 2] = 2
    with pytest.raises(ReplicaMismatchError, match="'b'"):
        compare(states, to_minimum_rank=True)


@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole.t(),
        lambda whole: whole[:, 3:-3],
        lambda whole: whole[::2],
        lambda whole: whole.to(torch.complex64).t(),
        lambda whole: whole.to(torch.float8_e4m3fn).t(),
        lambda whole: whole.to(torch.complex128)[:, 1:],
        lambda whole: whole.expand(3, *whole.shape),
    ],
)
def test_samples_are_of_the_values_however_they_lie_in_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = torch.randn(300, 400)
    states: list[dict[str, Any]] = [{"w": view(whole)}, {"w": view(whole).contiguous()}]
    compare(states)
    states[1]["w"] = view(torch.randn(300, 400))
    with pytest.raises(ReplicaMismatchError):
        compare(states)


def test_a_python_value_is_compared_whole() -> None:
    states: list[dict[str, Any]] = [{"n": [0] * 3_000_000, "w": torch.ones(3)} for _ in range(2)]
    compare(states)
    states[1]["n"] = [*[0] * 2_000_000, 1, *[0] * 999_999]
    with pytest.raises(ReplicaMismatchError, match="'n'"):
        compare(states)


class Pickled:
    """Typed JSON does not know it."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.filterwarnings("ignore::hpdcp._state.objects.PickledObjectWarning")
def test_a_pickled_value_is_compared_as_any_other() -> None:
    compare([{"own": Pickled(1)}, {"own": Pickled(1)}])
    with pytest.raises(ReplicaMismatchError, match="'own'"):
        compare([{"own": Pickled(1)}, {"own": Pickled(2)}])


def test_a_message_names_no_more_than_can_be_read() -> None:
    states = [{f"w{number}": torch.full((4,), float(rank)) for number in range(500)} for rank in range(9)]
    with pytest.raises(ReplicaMismatchError, match=r"500 keys .* and \d+ more") as caught:
        compare(states)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("seed", range(20))
def test_random_states_are_refused_exactly_where_they_differ(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 5))
    setting: ReplicaCheck = "sample" if seed % 2 else "all"
    states: list[dict[str, Any]] = [{} for _ in range(ranks)]
    expected = set()
    for number in range(12):
        holders = random.permutation(ranks)[: random.integers(1, ranks + 1)].tolist()
        value: Any = torch.randn(int(random.integers(1, 60_000))) if number % 3 else [float(random.random())]
        for rank in holders:
            states[rank][f"k{number}"] = value.clone() if isinstance(value, torch.Tensor) else list(value)
        if random.random() < 0.2:
            odd = int(random.choice(holders))
            states[odd][f"k{number}"] = value * 2
            if len(holders) > 1:
                expected.add(f"k{number}")
    if expected:
        with pytest.raises(ReplicaMismatchError) as caught:
            compare(states, setting)
        assert all(f"{name!r} (" in str(caught.value) for name in expected)
        assert str(caught.value).startswith(f"{len(expected)} key")
    else:
        compare(states, setting)


@pytest.mark.parametrize("elements", [3, SAMPLE_BYTES // 4 + 1])
@pytest.mark.parametrize("setting", ["sample", "all", {"other.*": "off"}])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "in parts"])
def test_a_name_that_only_some_ranks_tie_is_compared_with_what_they_tie_it_to(
    monkeypatch: pytest.MonkeyPatch, elements: int, setting: Setting, split: bool
) -> None:
    if split:
        monkeypatch.setattr(replicas, "SPLIT_BYTES", 1000)

    def states(weights: Sequence[int], tied: Mapping[int, str], odd: int | None = None) -> list[dict[str, Any]]:
        made = []
        for rank in range(3):
            state: dict[str, Any] = {name: torch.full((elements,), 1.0) for name in ("a", "b", "c")}
            if rank in tied:
                state["b"] = state[tied[rank]]
            if rank == odd:
                state["b"] = state["b"] + 1
            # Who writes b depends on what else each has to write.
            made.append(state | {f"own{rank}": torch.ones(weights[rank] * elements)})
        return made

    for weights in ((0, 4, 8), (8, 4, 0), (4, 0, 8)):
        for tied in ({0: "a"}, {2: "a"}, {0: "a", 1: "a"}, {0: "a", 2: "c"}, {0: "a", 1: "c"}):
            compare(states(weights, tied), setting)
            for odd in {0, 1, 2} - tied.keys():
                with pytest.raises(ReplicaMismatchError, match=r"'b' \(.*PerRank"):
                    compare(states(weights, tied, odd), setting)


def test_two_ranks_that_tie_a_name_to_different_values_are_told_so() -> None:
    for setting in ("sample", "all"):
        one, two, three = (torch.full((100_000,), float(value)) for value in (1, 2, 3))
        states = [{"a": one, "b": one, "c": two}, {"a": one.clone(), "b": (c := two.clone()), "c": c}]
        with pytest.raises(ReplicaMismatchError, match=r"1 key is .* 'b' "):
            compare(states, setting)
        states[1] |= {"b": three}
        with pytest.raises(ReplicaMismatchError, match=r"1 key is .* 'b' "):
            compare(states, setting)
        for exempt in ({"b": "off"}, {"*": "all", "b": "off"}):
            compare(states, exempt)


def test_a_name_that_is_tied_to_one_that_may_differ_may_differ_itself() -> None:
    states: list[dict[str, Any]] = []
    for rank in range(2):
        mean = torch.full((100_000,), float(rank))
        states.append({"bn.mean": mean, "also": mean if rank == 0 else torch.zeros(100_000), "w": torch.ones(3)})
    compare(states, {"bn.*": "off"})


@pytest.mark.parametrize("large", [False, True])
def test_python_values_are_compared_by_what_they_mean(large: bool) -> None:
    filler = {"filler": ["x" * 100_000]} if large else {}
    values = [[{"a": 1, "b": 0.0, "c": {1, 2}}], [{"c": {2, 1}, "b": -0.0, "a": 1}], [{"b": 0.0, "a": 1, "c": {1, 2}}]]
    compare([{"v": [*value, filler], "n": float("nan")} for value in values])


@pytest.mark.parametrize("odd", range(3))
def test_how_python_values_differ_is_said(odd: int) -> None:
    def state(rank: int) -> dict[str, Any]:
        lr = 0.2 if rank == odd else 0.1
        return {"groups": [{"name": "x", "lr": lr}], "step": 4 if rank == odd else 3, "same": [1]}

    with pytest.raises(ReplicaMismatchError) as caught:
        compare([state(rank) for rank in range(3)])
    if odd:
        assert f"'groups' (rank {odd} from rank 0: 0.2 and 0.1 at [0]['lr'])" in str(caught.value)
        assert f"'step' (rank {odd} from rank 0: 4 and 3)" in str(caught.value)
    else:
        assert "'step' (ranks 1, 2 from rank 0: 3 and 4)" in str(caught.value)
    assert "'same'" not in str(caught.value)


def test_of_many_or_large_values_that_they_differ_is_all_that_is_said() -> None:
    states = [{f"v{n:03}": [f"{rank} of {n}" * 100] for n in range(60)} for rank in range(2)]
    with pytest.raises(ReplicaMismatchError, match=r"'v000' \(rank 1 from .*: '1 of 0.*'v005' \(rank 1 from rank 0\)"):
        compare(states)
    with pytest.raises(ReplicaMismatchError, match=r"'v' \(rank 1 from rank 0\)"):
        compare([{"v": [str(rank) * 3000]} for rank in range(2)])


def test_optimizers_of_other_parameters_are_told_to_save_names() -> None:
    for key in ("param_groups", "optim.param_groups"):
        name, _, inner = key.rpartition(".")
        states = [{name: {inner: [{"params": [f"layers.{rank}"]}]}} if name else {inner: [rank]} for rank in range(2)]
        with pytest.raises(ReplicaMismatchError, match=r"flatten_optimizer_state_dict=True"):
            compare(states)
    with pytest.raises(StateDictError, match=r"'opt\.state\.0\.m' .*flatten_optimizer_state_dict=True"):
        compare([{"opt": {"state": {0: {"m": torch.ones(rank + 2)}}}} for rank in range(2)])
    with pytest.raises(ReplicaMismatchError) as caught:
        compare([{"state": rank, "stated.0.x": rank} for rank in range(2)])
    assert "flatten" not in str(caught.value)
