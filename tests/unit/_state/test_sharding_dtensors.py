"""A DTensor's chunks hold what torch's own splitting puts on each rank.

One process plays every rank in turn, over torch's fake process group. Local tensors are cut from a tensor whose values
are its own cell numbers, so that a chunk's box and its memory can be compared cell by cell.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from hpdcp._base.errors import StateDictError, UnsupportedTypeError
from hpdcp._state.geometry import Box
from hpdcp._state.sharding import LocalShards, local_shards
from hpdcp._state.ties import tie_key


@contextmanager
def playing(rank: int, world: int) -> Iterator[None]:
    # Meshes of two ranks are equal to torch, which would answer with the mesh of the rank played before.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(tuple(shape))


def cells(box: Box, shape: Sequence[int]) -> torch.Tensor:
    return numbered(shape)[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))]


def check(shards: LocalShards, local: torch.Tensor) -> list[int]:
    """The cells held, after making sure that every chunk's memory is its box's and that the local tensor is used up."""
    held: list[int] = []
    for chunk in shards.chunks:
        view = shards.view(chunk)
        assert not chunk.box.is_empty
        assert torch.equal(view, cells(chunk.box, shards.global_shape))
        assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        held += view.reshape(-1).tolist()
    assert sorted(held) == sorted(local.reshape(-1).tolist())
    return held


REGULAR: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(-1)]
EVERY: list[Placement] = [*REGULAR, _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]


def combinations(mesh_shape: tuple[int, ...], most: int) -> list[tuple[Placement, ...]]:
    found = list(itertools.product(EVERY, repeat=len(mesh_shape)))
    return found if len(found) <= most else random.Random(7).sample(found, most)


@pytest.mark.parametrize("mesh_shape", [(4,), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(6, 8), (5, 7), (1, 3), (12, 0)])
def test_chunks_of_all_ranks_are_what_torch_distributes(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    world = math.prod(mesh_shape)
    cases = combinations(mesh_shape, 40)
    holders: dict[tuple[Placement, ...], list[int]] = {case: [0] * math.prod(shape) for case in cases}
    unclear: set[tuple[Placement, ...]] = set()
    for rank in range(world):
        with playing(rank, world):
            mesh = init_device_mesh("cpu", mesh_shape)
            for case in cases:
                tensor = distribute_tensor(numbered(shape), mesh, case, src_data_rank=None)
                try:
                    shards = local_shards(tensor, key="weight")
                except StateDictError:
                    unclear.add(case)
                    continue
                assert shards.global_shape == shape
                assert shards.dtype is torch.int64
                for cell in check(shards, tensor.to_local()):
                    holders[case][cell] += 1
    # The two readings of torch's notation agree nearly everywhere; none of these cases may hide behind them.
    assert len(unclear) <= 2
    for case in set(cases) - unclear:
        copies = math.prod(n for n, placement in zip(mesh_shape, case, strict=True) if isinstance(placement, Replicate))
        assert holders[case] == [copies] * math.prod(shape), case


@pytest.mark.parametrize(
    ("placements", "rows"),
    [
        ((_StridedShard(0, split_factor=2), Replicate()), [0, 1, 4, 5]),
        ((Shard(0), _StridedShard(0, split_factor=2)), [0, 2]),
    ],
)
def test_rows_that_lie_apart_are_several_chunks(placements: tuple[Placement, ...], rows: list[int]) -> None:
    with playing(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = distribute_tensor(numbered((8, 3)), mesh, placements, src_data_rank=None)
        shards = local_shards(tensor, key="weight")
        assert len(shards.chunks) == 2
        assert [row for c in shards.chunks for row in range(c.box.offsets[0], c.box.stops[0])] == rows
        check(shards, tensor.to_local())


def test_0_dim_tensors_are_one_chunk_of_no_dimensions_on_every_rank() -> None:
    with playing(1, 2):
        tensor = distribute_tensor(torch.tensor(0), init_device_mesh("cpu", (2,)), [Replicate()], src_data_rank=None)
        shards = local_shards(tensor, key="step")
        assert [chunk.box for chunk in shards.chunks] == [Box((), ())]
        assert shards.view(shards.chunks[0]).shape == ()


def test_an_empty_shard_and_a_rank_outside_the_mesh_hold_no_chunk_and_know_the_global_shape() -> None:
    with playing(3, 6):
        whole = init_device_mesh("cpu", (6,))
        empty = local_shards(distribute_tensor(numbered((3, 2)), whole, [Shard(0)], src_data_rank=None), key="a")
        assert (empty.chunks, empty.global_shape) == ((), (3, 2))
        part = DeviceMesh("cpu", [0, 1], _init_backend=False)
        outside = local_shards(
            DTensor.from_local(torch.zeros(0), part, [Shard(0)], shape=torch.Size((4,)), stride=(1,)), key="b"
        )
        assert (outside.chunks, outside.global_shape, outside.tensors) == ((), (4,), ())


def sharded_by_fsdp(rank: int, mesh_shape: tuple[int, int], rows: int) -> nn.Parameter:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    module = nn.Linear(3, rows, bias=False)
    whole = numbered((rows, 3)).float()
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(module, mesh=mesh["dp"])
    return module.weight


@pytest.mark.parametrize(("mesh_shape", "rows"), [((2, 2), 8), ((2, 2), 5), ((3, 2), 7), ((2, 4), 10)])
def test_fsdp_over_tensor_parallelism_on_one_dimension_is_read_as_fsdp_made_it(
    mesh_shape: tuple[int, int], rows: int
) -> None:
    held: list[int] = []
    world = math.prod(mesh_shape)
    for rank in range(world):
        with playing(rank, world):
            weight = sharded_by_fsdp(rank, mesh_shape, rows)
            assert isinstance(weight, DTensor)
            assert isinstance(weight.placements[0], _StridedShard)
            held += [int(cell) for cell in check(local_shards(weight, key="weight"), weight.to_local())]
    assert sorted(held) == list(range(rows * 3))


def test_an_uneven_shard_that_could_be_either_of_two_row_ranges_is_refused_naming_both() -> None:
    with playing(10, 12):
        weight = sharded_by_fsdp(10, (3, 4), 27)
        with pytest.raises(StateDictError, match=r"^weight: .*ambiguous .*\(26, 0\).*\(20, 0\)"):
            local_shards(weight, key="weight")


def test_partial_and_unknown_placements_are_refused_with_the_key() -> None:
    class Interleaved(Shard):
        pass

    with playing(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(UnsupportedTypeError, match=r"^grad: it is placed as Partial.*redistribute"):
            local_shards(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False), key="grad")
        with pytest.raises(UnsupportedTypeError, match=r"^w: its placement .*Interleaved"):
            local_shards(DTensor.from_local(torch.ones(2), mesh, [Interleaved(0)], run_check=False), key="w")


def test_a_local_tensor_of_another_shape_than_its_placements_say_is_refused() -> None:
    with playing(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        # Ranks hold 2, 2, 1, 1 of 6 here; torch divides 6 among 4 as 2, 2, 2, 0.
        odd = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], shape=torch.Size((6,)), stride=(1,))
        with pytest.raises(StateDictError, match=r"^w: .*shape \(2,\); found one of shape \(1,\).*global shape"):
            local_shards(odd, key="w")


def test_equal_meshes_of_different_ranks_are_not_mistaken_for_one_another() -> None:
    offsets = []
    for rank in range(2):
        with playing(rank, 2):
            tensor = distribute_tensor(numbered((4,)), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
            offsets.append(local_shards(tensor, key="w").chunks[0].box.offsets)
    assert offsets == [(0,), (2,)]


def test_strided_locals_and_parameters_are_filled_through_the_view() -> None:
    with playing(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
        parameter = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        shards = local_shards(parameter, key="conv.weight")
        (chunk,) = shards.chunks
        assert chunk.box == Box((2, 0, 0, 0), (2, 3, 4, 5))
        shards.view(chunk).copy_(torch.ones(2, 3, 4, 5))
        assert local.eq(1).all()
        assert parameter.requires_grad
        assert not shards.tensors[0].requires_grad


def test_a_wrapper_as_local_tensor_is_refused_with_the_key() -> None:
    two_tensor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = TwoTensor

    with playing(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        two = DTensor.from_local(two_tensor(torch.ones(2), torch.ones(2)), mesh, [Shard(0)], run_check=False)
        with pytest.raises(UnsupportedTypeError, match=r"^w: .*TwoTensor holds its values in other tensors"):
            local_shards(two, key="w")


def test_dtensors_are_tied_by_memory_and_by_what_they_are_a_shard_of() -> None:
    with playing(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(2)
        one, other = (DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for _ in range(2))
        replicated = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        assert tie_key(one) == tie_key(other) == tie_key(nn.Parameter(one))
        assert hash(tie_key(one)) == hash(tie_key(other))
        assert len({tie_key(one), tie_key(replicated), tie_key(local), tie_key(one.clone())}) == 4
        assert tie_key(DTensor.from_local(torch.ones(0), mesh, [Shard(0)], run_check=False)) is None


def test_a_local_tensor_still_on_its_way_is_waited_for() -> None:
    with playing(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        gathered = sharded.redistribute(placements=[Replicate()], async_op=True)
        assert isinstance(gathered._local_tensor, AsyncCollectiveTensor)
        shards = local_shards(gathered, key="w")
        (chunk,) = shards.chunks
        assert type(shards.view(chunk)) is torch.Tensor
        assert shards.view(chunk).shape == (4,)
        assert tie_key(gathered) == tie_key(gathered)
