"""Who reads what several ranks want: groups, reader ranks, stripes, and the one order of it all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._broadcast import _stripes, reader_choice
from hpdcp._broadcast.reader_choice import GroupRules, choose_readers
from hpdcp._format.columns import ChunkTable, Entry, EntryKind, EntryTable
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan.load_plan import LoadPlan, LoadTarget, ReadItem
from hpdcp._plan.shared_boxes import Group, SharedBox

Shape = tuple[int, ...]
Stored = Mapping[str, tuple[str, Shape]]
"""fqn → dtype and shape; each is stored in one chunk."""


def _metadata(stored: Stored, aliases: Mapping[str, str] | None = None) -> Metadata:
    entries = [Entry(fqn, fqn, EntryKind.TENSOR, dtype, shape) for fqn, (dtype, shape) in stored.items()]
    for name, target in (aliases or {}).items():
        entries.append(Entry(name, name, EntryKind.ALIAS, *stored[target], target=target))
    entries.sort(key=lambda entry: entry.fqn)
    rows = [(row, entry.shape) for row, entry in enumerate(entries) if entry.kind is EntryKind.TENSOR]
    boxes = [((0,) * len(shape), shape) for _, shape in rows]
    return Metadata(EntryTable.from_entries(entries), ChunkTable.from_boxes([row for row, _ in rows], boxes))


def _plan(metadata: Metadata, wanted: Sequence[tuple[str, Shape, Shape]], *, direct: bool = True) -> LoadPlan:
    """A rank that wants these boxes of the stored tensors."""
    items, targets = [], []
    for fqn, offsets, sizes in wanted:
        row = metadata.rows_of(fqn)[0]
        index = MetadataIndex(fqn, offsets, sizes)
        items.append(ReadItem(index, metadata.chunk_rows(row)[0], (0,) * len(sizes), offsets, sizes))
        targets.append(LoadTarget(index, metadata.entries.dtype(row), direct))
    return LoadPlan.build(items, targets)


def _whole(stored: Stored, *names: str) -> list[tuple[str, Shape, Shape]]:
    return [(name, (0,) * len(stored[name][1]), stored[name][1]) for name in names or stored]


def _choose(
    plans: Sequence[LoadPlan],
    metadata: Metadata,
    *,
    batch_bytes: int = 0,
    shares: Callable[[Group], bool] = lambda group: True,
    exists: Callable[[Group], bool] = lambda group: True,
) -> tuple[list[LoadPlan], list[Group]]:
    """The final plans, as each rank gets them."""
    arrived = [LoadPlan.from_bytes(plan.to_bytes()) for plan in plans]
    rules = GroupRules(batch_bytes, shares, exists, carries_devices=lambda group: False)
    decided, groups = choose_readers(arrived, metadata, rules)
    sent = [plan.to_part(mine) for plan, mine in zip(decided, arrived, strict=True)]
    return [LoadPlan.from_part(part, mine) for part, mine in zip(sent, plans, strict=True)], groups


def _bytes(box: SharedBox) -> int:
    return math.prod(box.sizes) * getattr(torch, box.stored_dtype).itemsize


def _loads(plans: Sequence[LoadPlan]) -> list[int]:
    """Bytes that each rank reads for others."""
    return [sum(_bytes(box) for box in plan.shared if box.info.reader_rank == rank) for rank, plan in enumerate(plans)]


def test_only_what_several_ranks_want_alike_is_shared() -> None:
    stored: Stored = {"a": ("float32", (4, 4)), "b": ("float32", (4, 4)), "c": ("float32", (4, 4))}
    metadata = _metadata(stored)
    plans = [
        _plan(metadata, [*_whole(stored, "a"), ("b", (0, 0), (2, 4)), ("c", (0, 0), (4, 2))]),
        _plan(metadata, [*_whole(stored, "a"), ("b", (2, 0), (2, 4)), ("c", (0, 0), (4, 2))]),
        _plan(metadata, [("c", (0, 0), (2, 4))]),
    ]
    decided, groups = _choose(plans, metadata)
    assert groups == [(0, 1)]
    assert [[box.index.fqn for box in plan.shared] for plan in decided] == [["a", "c"], ["a", "c"], []]
    assert decided[0].shared == decided[1].shared
    assert [plan.items for plan in decided] == [plan.items for plan in plans]


def test_what_ranks_read_for_themselves_counts_before_they_read_for_others() -> None:
    stored: Stored = {"own": ("float32", (1000,)), **{f"s{n}": ("float32", (100,)) for n in range(6)}}
    metadata = _metadata(stored)
    shared = _whole(stored, *[name for name in stored if name != "own"])
    decided, _ = _choose([_plan(metadata, [*_whole(stored, "own"), *shared]), *[_plan(metadata, shared)] * 3], metadata)
    assert _loads(decided) == [0, 800, 800, 800]


def test_large_boxes_are_given_out_first() -> None:
    sizes = (7, 7, 6, 6, 5, 4, 4, 3)
    stored: Stored = {f"s{n}": ("float32", (size,)) for n, size in enumerate(reversed(sizes))}
    metadata = _metadata(stored)
    decided, _ = _choose([_plan(metadata, _whole(stored))] * 3, metadata)
    assert sorted(_loads(decided)) == [12 * 4, 15 * 4, 15 * 4]


def test_the_order_is_that_of_the_files() -> None:
    stored: Stored = {
        "z": ("float64", (2,)),
        "a": ("int8", (2,)),
        "m": ("bfloat16", (2, 2)),
        "b": ("float32", (2,)),
        "é": ("float32", (2,)),
        "k": ("complex128", (2,)),
    }
    metadata = _metadata(stored)
    wanted = [box for box in _whole(stored) if box[0] != "m"] + [("m", (0, 0), (1, 2)), ("m", (1, 0), (1, 2))]
    decided, _ = _choose([_plan(metadata, wanted), _plan(metadata, wanted[::-1])], metadata)
    for plan in decided:
        order = [(box.index.fqn, box.index.offsets) for box in plan.shared]
        assert order == [("k", (0,)), ("z", (0,)), ("b", (0,)), ("é", (0,)), ("m", (0, 0)), ("m", (1, 0)), ("a", (0,))]
    transport = {box.index.fqn: box.info.transport_dtype for box in decided[0].shared}
    assert transport == {"k": "uint8", "z": "float64", "b": "float32", "é": "float32", "m": "bfloat16", "a": "int8"}


def test_all_members_must_be_able_to_receive_straight() -> None:
    stored: Stored = {"a": ("float32", (4,)), "b": ("float32", (4,))}
    metadata = _metadata(stored)
    straight, strided = _plan(metadata, _whole(stored)), _plan(metadata, _whole(stored, "b"), direct=False)
    decided, _ = _choose([straight, straight, strided], metadata)
    assert {box.index.fqn: box.info.direct for box in decided[0].shared} == {"a": True, "b": False}
    other = LoadPlan.build(straight.items, [LoadTarget(item.dest_index, "float64", True) for item in straight.items])
    decided, _ = _choose([straight, other], metadata)
    assert [box.info.direct for box in decided[0].shared] == [False, False]


def test_what_the_planner_does_not_describe_is_never_shared() -> None:
    stored: Stored = {"a": ("float32", (4,))}
    metadata = _metadata(stored)
    silent = LoadPlan.build(_plan(metadata, _whole(stored)).items)
    decided, groups = _choose([_plan(metadata, _whole(stored)), silent, _plan(metadata, _whole(stored))], metadata)
    assert groups == [(0, 2)]
    assert not decided[1].shared


def test_state_of_a_rank_s_own_is_never_shared() -> None:
    stored: Stored = {"a": ("float32", (4,))}
    metadata = _metadata(stored)
    index = MetadataIndex("a", (0,), (4,), owner=1)
    mine = LoadPlan.build([ReadItem(index, 0, (0,), (0,), (4,))], [LoadTarget(index, "float32", True)])
    assert _choose([mine, mine], metadata)[1] == []


def test_names_of_one_stored_tensor_are_shared_under_each_rank_s_own_name() -> None:
    stored: Stored = {"embed": ("float32", (8,))}
    metadata = _metadata(stored, {"head": "embed"})
    box = ((0,), (8,))
    plans = [
        _plan(metadata, [("embed", *box)]),
        _plan(metadata, [("head", *box)]),
        _plan(metadata, [("embed", *box), ("head", *box)]),
        _plan(metadata, [("head", *box), ("embed", *box)]),
    ]
    decided, groups = _choose(plans, metadata)
    assert groups == [(0, 1, 2, 3), (2, 3)]
    assert [[box.index.fqn for box in plan.shared] for plan in decided] == [
        ["embed"],
        ["head"],
        ["embed", "head"],
        ["head", "embed"],
    ]


@pytest.mark.parametrize("shape", [(64, 16), (1, 1024), (2, 512), (1024,), (3, 5, 70), (2, 1, 700)])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_a_large_chunk_is_cut_into_boxes_for_its_members(
    shape: Shape, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stripes, "STRIPE_BYTES", 1024)
    stored: Stored = {"large": ("float32", shape), "small": ("float32", (16,))}
    metadata = _metadata(stored)
    decided, _ = _choose([_plan(metadata, _whole(stored))] * members, metadata)
    boxes = [box for box in decided[0].shared if box.index.fqn == "large"]
    covered = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        where = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        assert covered[where].is_contiguous() and _bytes(box) <= 1024
        covered[where] += 1
    assert bool((covered == 1).all())
    loads = _loads(decided)
    assert max(loads) - min(loads) <= max(_bytes(box) for box in boxes)
    assert [box.offsets for box in boxes] == sorted(box.offsets for box in boxes)


def test_elements_wider_than_a_stripe_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stripes, "STRIPE_BYTES", 4)
    stored: Stored = {"a": ("complex128", (3,)), "b": ("complex128", ())}
    metadata = _metadata(stored)
    decided, _ = _choose([_plan(metadata, _whole(stored))] * 2, metadata)
    assert [box.sizes for box in decided[0].shared] == [(1,), (1,), (1,), ()]


def test_small_neighbours_go_to_one_rank_and_the_bytes_are_even() -> None:
    mib = 1 << 20
    stored: Stored = {f"s{n:03d}": ("uint8", (mib // 16,)) for n in range(512)}
    metadata = _metadata(stored)
    decided, _ = _choose([_plan(metadata, _whole(stored))] * 4, metadata, batch_bytes=6 * mib)
    readers_in_order = [box.info.reader_rank for box in decided[0].shared]
    changes = sum(a != b for a, b in itertools.pairwise(readers_in_order))
    assert changes == 7  # 32 MiB in eight runs of 4 MiB
    assert _loads(decided) == [8 * mib] * 4


def test_a_little_is_read_by_one_rank_in_one_go() -> None:
    stored: Stored = {f"s{n:03d}": ("uint8", (1000,)) for n in range(100)}
    metadata = _metadata(stored)
    decided, _ = _choose([_plan(metadata, _whole(stored))] * 4, metadata, batch_bytes=1 << 20)
    assert sorted(_loads(decided)) == [0, 0, 0, 100_000]


def test_of_new_groups_those_that_save_the_most_bytes_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_choice, "MOST_NEW_GROUPS", 2)
    stored: Stored = {
        "pair": ("uint8", (100,)),
        "other pair": ("uint8", (90,)),
        "triple": ("uint8", (60,)),
        "all": ("uint8", (5,)),
    }
    metadata = _metadata(stored)
    names = [
        ["pair", "triple", "all"],
        ["pair", "triple", "all"],
        ["other pair", "triple", "all"],
        ["other pair", "all"],
    ]
    plans = [_plan(metadata, _whole(stored, *wanted)) for wanted in names]
    decided, groups = _choose(plans, metadata, exists=lambda group: len(group) == 4)
    # Two members spare one read, three spare two.
    assert groups == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert [box.index.fqn for box in decided[3].shared] == ["all"]
    assert [box.index.fqn for box in decided[2].shared] == ["all", "triple"]


def test_a_group_that_does_not_share_reads_for_itself() -> None:
    stored: Stored = {"pair": ("uint8", (100,)), "all": ("uint8", (5,))}
    metadata = _metadata(stored)
    plans = [_plan(metadata, _whole(stored)), _plan(metadata, _whole(stored)), _plan(metadata, _whole(stored, "all"))]
    decided, groups = _choose(plans, metadata, shares=lambda group: len(group) > 2)
    assert groups == [(0, 1, 2)]
    assert [[box.index.fqn for box in plan.shared] for plan in decided] == [["all"]] * 3


def test_nothing_wanted_and_nothing_stored_is_fine() -> None:
    empty = _metadata({})
    decided, groups = _choose([LoadPlan.build([])] * 3, empty)
    assert groups == []
    assert [plan.shared for plan in decided] == [()] * 3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_rank_s_parts_are_the_same_walk(data: st.DataObject) -> None:
    dtypes = st.sampled_from(["float32", "int16", "float64", "bool"])
    shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    stored = data.draw(st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.tuples(dtypes, shapes), max_size=8))
    metadata = _metadata(stored)
    ranks = data.draw(st.integers(2, 6))
    plans = []
    for _ in range(ranks):
        names = data.draw(st.lists(st.sampled_from(sorted(stored)), unique=True)) if stored else []
        plans.append(_plan(metadata, _whole(stored, *names) if names else []))
    batch_bytes = data.draw(st.sampled_from([0, 20, 1 << 20]))
    decided, groups = _choose(plans, metadata, batch_bytes=batch_bytes)
    order: dict[tuple[str, Shape], int] = {}
    edges = set()
    for rank, plan in enumerate(decided):
        walk = [(box.index.fqn, box.offsets) for box in plan.shared]
        assert len(set(walk)) == len(walk)
        edges |= {(a, b) for i, a in enumerate(walk) for b in walk[i + 1 :]}
        for box in plan.shared:
            assert rank in box.info.group and box.info.reader_rank in box.info.group
            assert box.info.group in groups
            assert box in decided[box.info.reader_rank].shared
            order.setdefault((box.index.fqn, box.offsets), len(order))
    assert not {(b, a) for a, b in edges} & edges
    wanted_by: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            wanted_by.setdefault(item.dest_index.fqn, []).append(rank)
    assert {fqn for fqn, _ in order} == {fqn for fqn, ranks_ in wanted_by.items() if len(ranks_) > 1}
    for plan in decided:
        assert all(list(box.info.group) == wanted_by[box.index.fqn] for box in plan.shared)
