"""Tensors that are planned all at once, against the planner that looks at each by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hpdcp
from hpdcp._base.errors import HpdcpError
from hpdcp._format.columns import ChunkTable, Entry, EntryKind, EntryTable
from hpdcp._format.metadata import NO_CHECKSUMS, Metadata, MetadataIndex
from hpdcp._plan import standard_load_planner
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.standard_load_planner import StandardLoadPlanner
from hpdcp._plan.straight_reads import StraightReads, WantedTensors, straight_reads, wanted_tensors
from hpdcp._state.geometry import Box
from hpdcp._state.tree import StateTree

_CONTEXT = PlannerContext(rank=0, world_size=1, is_coordinator=True, collective=False)
_DTYPES = [torch.float32, torch.int64, torch.bfloat16]
_MEMORY: dict[str, Callable[[tuple[int, ...], torch.dtype], torch.Tensor]] = {
    "plain": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    "parameter": lambda shape, dtype: torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False),
    "part of another": lambda shape, dtype: torch.zeros((3, *shape), dtype=dtype)[1],
    "other strides": lambda shape, dtype: torch.zeros((*shape, 2), dtype=dtype)[..., 0],
    "expanded": lambda shape, dtype: torch.zeros((), dtype=dtype).expand(shape),
    "negative": lambda shape, _: torch._neg_view(torch.zeros(shape)),
    "on meta": lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
    "numpy's": lambda shape, _: torch.from_numpy(np.zeros(shape, np.float32)),
    "buffer": lambda shape, dtype: torch.nn.Buffer(torch.zeros(shape, dtype=dtype)),
}


@dataclass(frozen=True)
class _Case:
    metadata: Metadata
    state: dict[str, torch.Tensor]


def _cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes of a grid over `shape`, some of them left out, some twice."""
    axes = []
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        axes.append([(a, b - a) for a, b in itertools.pairwise(cuts)])
    boxes = [Box(tuple(a for a, _ in each), tuple(n for _, n in each)) for each in itertools.product(*axes)]
    kept = [box for box in boxes if draw(st.integers(0, 30))]
    return sorted(kept + draw(st.lists(st.sampled_from(boxes), max_size=1) if boxes else st.just([])))


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    names = [f"w{number}" for number in range(draw(st.integers(1, 6)))]
    entries: list[Entry] = []
    boxes: list[tuple[int, Box]] = []
    state: dict[str, torch.Tensor] = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
        dtype = draw(st.sampled_from(_DTYPES))
        state[name] = _MEMORY[draw(st.sampled_from([*["plain"] * 6, *_MEMORY]))](shape, dtype)
        odd = draw(st.integers(0, 12))
        stored = draw(st.sampled_from(_DTYPES)) if odd == 1 else state[name].dtype
        stored_shape = (*shape, 2) if odd == 2 else shape
        if odd == 3:
            continue
        first = entries[0] if entries else None
        tied = first is not None and (first.dtype, first.shape) == (str(stored).removeprefix("torch."), stored_shape)
        target = first.fqn if first is not None and tied and odd >= 10 else ""
        kind = EntryKind.ALIAS if target else EntryKind.TENSOR
        entries.append(
            Entry(name, f'["{name}"]', kind, str(stored).removeprefix("torch."), stored_shape, target=target)
        )
        if not target:
            boxes += [(len(entries) - 1, box) for box in _cut(draw, stored_shape) if not box.is_empty]
    if len(names) > 1 and draw(st.booleans()):
        # Two names of one memory: tied, or overlapping.
        one, other = draw(st.permutations(names))[:2]
        state[one] = state[other] if draw(st.booleans()) else state[other].reshape(-1)[1:]
    chunk, of_shard = draw(st.sampled_from(names)), draw(st.integers(0, 3))
    if not of_shard and state[chunk].ndim and state[chunk].shape[0]:
        part = torch.zeros(1, *state[chunk].shape[1:], dtype=state[chunk].dtype)
        box = hpdcp.ChunkStorageMetadata((state[chunk].shape[0] - 1, *(0,) * (part.ndim - 1)), tuple(part.shape))
        setattr(part, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(box, tuple(state[chunk].shape)))
        state[chunk] = part
    table = ChunkTable.from_boxes([row for row, _ in boxes], [(box.offsets, box.sizes) for _, box in boxes])
    return _Case(Metadata(EntryTable.from_entries(entries), table, settings={"checksums": NO_CHECKSUMS}), state)


_Planned = tuple[set[Any], set[Any], dict[Any, tuple[int, tuple[int, ...], tuple[int, ...]]]]


def _planned(case: _Case) -> _Planned | str:
    """Items, targets and the memory of each item; or what is refused."""
    planner = StandardLoadPlanner()
    try:
        planner.configure_planner(case.state, case.metadata, _CONTEXT)
        plan = planner.build_local_plan()
    except HpdcpError as error:
        # Of two that overlap, either may be named first.
        return f"{type(error).__name__}: {sorted(str(error).split())}"
    memory = planner.acquire_tensors(plan.planned)
    for item, tensor in zip(plan.items, memory, strict=True):
        alone = planner.acquire_tensor(item)
        assert (alone.data_ptr(), alone.shape, alone.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())
        assert tuple(tensor.shape) == item.lengths
    assert list(plan.planned) == list(plan.items) == [plan.planned[number] for number in range(len(plan))]
    # Of tied targets one is read into a copy, and compared.
    begins = {tensor.data_ptr() for tensor in case.state.values()}
    where = {
        item: (tensor.data_ptr() if tensor.data_ptr() in begins else 0, tuple(tensor.shape), tensor.stride())
        for item, tensor in zip(plan.items, memory, strict=True)
    }
    return set(plan.items), _targets(plan), where


def _targets(plan: LoadPlan) -> set[tuple[MetadataIndex, str, int]]:
    columns, names = plan.target_columns, [*plan.dtype_names, "not said"]
    dtypes = [names[row] for row in columns.dtypes.tolist()]
    return set(zip(plan.indexes, dtypes, columns.direct.tolist(), strict=True))


@settings(max_examples=300, deadline=None)
@given(_cases())
def test_all_at_once_is_planned_and_refused_what_is_planned_and_refused_one_by_one(case: _Case) -> None:
    at_once = _planned(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standard_load_planner, "wanted_tensors", lambda leaves: wanted_tensors([]))
        one_by_one = _planned(case)
    assert at_once == one_by_one


def _straight(state: dict[str, torch.Tensor], metadata: Metadata) -> tuple[WantedTensors, StraightReads]:
    wanted = wanted_tensors(StateTree(state, rank=0).leaves)
    return wanted, straight_reads(wanted, metadata)


def test_each_of_many_boxes_of_many_tensors_is_found_among_its_own() -> None:
    count, rows = 20, 7
    entries = [Entry(f"w{n:02}", f'["w{n:02}"]', EntryKind.TENSOR, "float32", (rows * 2, 3)) for n in range(count)]
    boxes = [((2 * row, 0), (2, 3)) for _ in range(count) for row in range(rows)]
    owners = [entry for entry in range(count) for _ in range(rows)]
    metadata = Metadata(EntryTable.from_entries(entries), ChunkTable.from_boxes(owners, boxes))
    for row in range(rows):
        found = _straight_boxes(count, ((2 * row, 0), (2, 3)), (rows * 2, 3))
        wanted = straight_reads(found, metadata)
        assert wanted.storage_rows.tolist() == [entry * rows + row for entry in range(count)]
    between = _straight_boxes(count, ((1, 0), (2, 3)), (rows * 2, 3))
    assert len(straight_reads(between, metadata).wanted) == 0


def _straight_boxes(count: int, box: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> WantedTensors:
    """Plain tensors of the box' sizes, taken for that box of a larger tensor."""
    wanted = wanted_tensors(StateTree({f"w{n:02}": torch.zeros(box[1]) for n in range(count)}, rank=0).leaves)
    boxes = ChunkTable.from_boxes(range(count), [box] * count)
    return WantedTensors(wanted.leaves, wanted.memory, wanted.runs, boxes, np.tile(np.array(shape), count))


def test_the_usual_tensor_is_read_straight_and_what_differs_in_anything_is_not() -> None:
    whole = Box.whole((2, 3))
    entries = [
        Entry(name, f'["{name}"]', EntryKind.TENSOR, dtype, shape)
        for name, dtype, shape in (("a", "float32", (2, 3)), ("b", "float16", (2, 3)), ("c", "float32", (3, 2)))
    ]
    metadata = Metadata(
        EntryTable.from_entries(entries),
        ChunkTable.from_boxes([0, 1, 2], [(whole.offsets, whole.sizes)] * 2 + [((0, 0), (3, 2))]),
    )
    state = {name: torch.zeros(2, 3) for name in "abcd"}
    wanted, reads = _straight(state, metadata)
    assert [leaf.fqn for leaf in wanted.leaves] == ["a", "b", "c", "d"]
    assert [leaf.fqn for leaf in reads.wanted.leaves] == ["a"]
    assert reads.storage_rows.tolist() == [0]
    tied, _ = _straight({"a": state["a"], "b": state["a"], "c": state["c"]}, metadata)
    assert [leaf.fqn for leaf in tied.leaves] == ["c"]


def test_a_subclass_that_has_its_say_about_each_item_is_asked_about_each() -> None:
    asked: list[str] = []

    class Asked(StandardLoadPlanner):
        def acquire_tensor(self, item: hpdcp.planner.ReadItem) -> torch.Tensor:
            asked.append(f"acquire {item.dest_index.fqn}")
            return super().acquire_tensor(item)

        def apply_tensor(self, item: hpdcp.planner.ReadItem, tensor: torch.Tensor) -> None:
            asked.append(f"apply {item.dest_index.fqn}")
            super().apply_tensor(item, tensor)

    metadata = Metadata(
        EntryTable.from_entries([Entry("a", '["a"]', EntryKind.TENSOR, "float32", (2,))]),
        ChunkTable.from_boxes([0], [((0,), (2,))]),
    )
    planner, target = Asked(), torch.zeros(2)
    planner.configure_planner({"a": target}, metadata, _CONTEXT)
    plan = planner.build_local_plan()
    tensors = planner.acquire_tensors(plan.planned)
    planner.apply_tensors(plan.planned, tensors)
    assert [tensor.data_ptr() for tensor in tensors] == [target.data_ptr()]
    assert asked == ["acquire a", "apply a"]
