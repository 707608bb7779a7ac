"""What is planned in columns is what would be planned item by item."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import hpdcp
from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._devices.memory import memory_at
from hpdcp._format.columns import Entry, EntryKind
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, MetadataIndex
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.save_plan import SavePlan, WriteItem
from hpdcp._plan.standard_save_planner import StandardSavePlanner
from hpdcp._state import objects
from hpdcp._state.dtypes import dtype_name
from hpdcp._state.paths import encode_path, encode_paths
from hpdcp._state.sharding import local_shards
from hpdcp._state.tree import Leaf, walk
from tests.unit._state.test_sharding_dtensors import playing

CONTEXT = PlannerContext(0, 1, True, True)
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128, torch.float8_e4m3fn]


def plain(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    how = draw(st.sampled_from(["whole", "whole", "parameter", "turned", "rows", "chunk", "class"]))
    if how == "parameter" and tensor.dtype.is_floating_point:
        return torch.nn.Parameter(tensor)
    if how == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, 1)
    if how == "rows" and tensor.dim() and len(tensor) > 1:
        return tensor[1:]
    if how == "chunk" and tensor.dim():
        box = ChunkStorageMetadata((2,) * tensor.dim(), tuple(tensor.shape))
        setattr(tensor, CHUNK_INFO, ChunkInfo(box, tuple(size + 3 for size in tensor.shape)))
    return tensor.as_subclass(Named) if how == "class" else tensor


class Named(torch.Tensor):
    """A class of its own over ordinary memory."""


@st.composite
def states(draw: st.DrawFn) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    for number in range(draw(st.integers(0, 8))):
        key = draw(st.sampled_from([f"w{number}", f"ü{number}", number, f"a/{number}", f"p.{number}"]))
        kind = draw(st.sampled_from(["tensor", "tensor", "tensor", "value", "list", "dict", "own", "tied"]))
        if kind == "value":
            state[key] = draw(st.one_of(st.integers(), st.text(max_size=4), st.just([1, 2])))
        elif kind == "list":
            state[key] = [plain(draw), {"x": plain(draw)}]
        elif kind == "dict":
            state[key] = {True: plain(draw), "y": (plain(draw), 3)}
        elif kind == "own":
            state[key] = hpdcp.PerRank(plain(draw))
        elif kind == "tied" and state:
            state[key] = next(iter(state.values()))
        else:
            state[key] = plain(draw)
    return state


def item_by_item(leaves: Sequence[Leaf], tied: Mapping[str, str]) -> SavePlan:
    entries: list[Entry] = []
    items: list[WriteItem] = []
    for position, leaf in enumerate(leaves):
        fqn, path, owner = leaf.fqn, encode_path(leaf.path), leaf.owner
        if not isinstance(leaf.value, torch.Tensor):
            entries.append(Entry(fqn, path, EntryKind.OBJECT, owner=owner, position=position))
            length = len(objects.encode(leaf.value, key=fqn, tensors=owner is not None).data)
            items.append(WriteItem(MetadataIndex(fqn, owner=owner), EntryKind.OBJECT, length))
            continue
        shards = local_shards(leaf.value, key=fqn)
        target = tied.get(fqn, "")
        kind = EntryKind.ALIAS if target else EntryKind.TENSOR
        dtype = dtype_name(shards.dtype)
        entries.append(Entry(fqn, path, kind, dtype, shards.global_shape, owner, target, position))
        for chunk in () if target else shards.chunks:
            index = MetadataIndex(fqn, chunk.box.offsets, chunk.box.sizes, owner)
            items.append(WriteItem(index, EntryKind.TENSOR, chunk.box.volume * shards.dtype.itemsize))
    return SavePlan.build(entries, items)


def configured(state: Mapping[Any, Any], planner: StandardSavePlanner | None = None) -> StandardSavePlanner:
    planner = planner or StandardSavePlanner()
    planner.configure_planner(state, CONTEXT)
    return planner


def assert_same_plans(plan: SavePlan, expected: SavePlan) -> None:
    assert [plan.entries[row] for row in range(len(plan.entries))] == [
        expected.entries[row] for row in range(len(expected.entries))
    ]
    assert list(plan.items) == list(expected.items)
    assert {name: values.dtype for name, values in plan.entries.to_columns().items()} == {
        name: values.dtype for name, values in expected.entries.to_columns().items()
    }
    assert plan.to_bytes() == expected.to_bytes()


def assert_addresses_hold_the_items(planner: StandardSavePlanner, plan: SavePlan) -> int:
    """Compares each item that has an address with its tensor; how many there are."""
    addresses = planner.get_addresses(plan).tolist()
    for address, item in zip(addresses, plan.items, strict=True):
        if address:
            data = planner.get_tensor(item).contiguous().view(-1).view(torch.uint8)
            assert bytes(memory_at(address, item.nbytes)) == bytes(data.tolist())
    return sum(map(bool, addresses))


@settings(deadline=None)
@given(states())
def test_a_plan_is_that_of_its_items(state: dict[Any, Any]) -> None:
    try:
        leaves = walk(state, rank=0)
    except hpdcp.errors.StateDictError:
        return
    planner = configured(state)
    plan = planner.build_local_plan()
    assert_same_plans(plan, item_by_item(leaves, planner._tied))
    assert_addresses_hold_the_items(planner, plan)
    # As the plan of an earlier save comes back, in another order.
    again = SavePlan.from_bytes(plan.to_bytes())
    assert_addresses_hold_the_items(planner, again.select(np.arange(len(again))[::-1]))


PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 5), st.lists(st.tuples(*[st.sampled_from(PLACEMENTS)] * 2), min_size=1, max_size=6), st.data())
def test_shards_are_planned_and_found_as_one_by_one(
    rank: int, placements: list[tuple[Placement, Placement]], data: st.DataObject
) -> None:
    with playing(rank, 6):
        mesh = init_device_mesh("cpu", (3, 2))
        state: dict[str, torch.Tensor] = {}
        for number, each in enumerate(placements):
            shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 6)))
            sizes, _ = compute_local_shape_and_global_offset(shape, mesh, each)
            cells = torch.arange(int(np.prod(sizes)), dtype=torch.int32).reshape(sizes)
            state[f"w{number}"] = DTensor.from_local(
                cells, mesh, each, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
        planner = configured(state)
        try:
            expected = item_by_item(walk(state, rank=0), {})
        except hpdcp.errors.HpdcpError as error:
            with pytest.raises(type(error), match="w"):
                planner.build_local_plan()
            return
        plan = planner.build_local_plan()
        assert_same_plans(plan, expected)
        assert_addresses_hold_the_items(planner, plan)


def test_tensors_of_the_host_have_addresses_and_others_are_asked_for() -> None:
    square = torch.arange(16.0).reshape(4, 4)
    state = {"a": square, "b": square.t(), "c": torch.zeros(0), "d": square[1:3], "e": 3, "f": torch.tensor(5)}
    planner = configured(state)
    plan = planner.build_local_plan()
    addresses = dict(zip((item.index.fqn for item in plan.items), planner.get_addresses(plan).tolist(), strict=True))
    assert addresses["a"] == square.data_ptr()
    assert addresses["d"] == square[1:3].data_ptr()
    assert addresses["f"] == state["f"].data_ptr()  # type: ignore[union-attr]
    assert (addresses["b"], addresses["e"]) == (0, 0)


def test_a_box_that_is_not_planned_so_has_no_address() -> None:
    planner = configured({"w": torch.zeros(4, 4)})
    boxes = [((0, 0), (2, 4)), ((0, 0), (4, 4)), ((2, 0), (2, 4))]
    entry = planner.build_local_plan().entries[0]
    items = [WriteItem(MetadataIndex("w", *box), EntryKind.TENSOR, 4 * int(np.prod(box[1]))) for box in boxes]
    addresses = planner.get_addresses(SavePlan.build([entry], items)).tolist()
    assert [address != 0 for address in addresses] == [False, True, False]
    other = [WriteItem(MetadataIndex("v", (0, 0), (4, 4)), EntryKind.TENSOR, 64)]
    stranger = SavePlan.build([Entry("v", '["v"]', EntryKind.TENSOR, "float32", (4, 4))], other)
    assert planner.get_addresses(stranger).tolist() == [0]


def test_freed_memory_is_refused_by_name_and_never_has_an_address() -> None:
    freed = torch.zeros(1000)
    freed.untyped_storage().resize_(0)
    planner = configured({"kept": torch.zeros(3), "freed": freed})
    with pytest.raises(UnsupportedTypeError, match="freed"):
        planner.build_local_plan()
    plan = configured({"kept": torch.zeros(3), "freed": torch.zeros(1000)}).build_local_plan()
    assert [address != 0 for address in planner.get_addresses(plan).tolist()] == [True, False]


class Doubling(hpdcp.StandardSavePlanner):
    """Stores something else than what is in the state."""

    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        return super().get_tensor(item) * 2


def test_what_a_derived_planner_gives_is_what_is_written(tmp_path: Path) -> None:
    state = {f"w{number:03d}": torch.full((4,), float(number)) for number in range(50)}
    hpdcp.save(state, checkpoint_id=tmp_path, planner=Doubling())
    target = {name: torch.zeros(4) for name in state}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert all(torch.equal(target[name], state[name] * 2) for name in state)


KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))


@given(st.lists(st.dictionaries(KEYS, st.dictionaries(KEYS, st.just(1), max_size=2), max_size=3), max_size=2))
def test_paths_are_encoded_together_as_each_by_itself(nested: list[Any]) -> None:
    try:
        paths = [leaf.path for leaf in walk(dict(enumerate([*nested, (torch.zeros(1), "v")])), rank=0)]
    except hpdcp.errors.HpdcpError:
        return
    assert encode_paths(paths) == [encode_path(path) for path in paths]


def test_memory_is_read_where_it_is() -> None:
    block = ctypes.create_string_buffer(b"twelve bytes")
    view = memory_at(ctypes.addressof(block) + 7, 5)
    assert bytes(view) == b"bytes"
    assert view.readonly
