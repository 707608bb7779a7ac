"""`RaggedShard`: units become intervals, intervals become chunks, and a carrier that behaves in a state dict."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import math
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpdcp._base.errors import InvalidArgumentError, StateDictError
from hpdcp._state import ragged
from hpdcp._state.ragged import RaggedShard, from_local
from hpdcp._state.sharding import local_shards
from hpdcp._state.ties import tie_key


@contextmanager
def playing(rank: int, mesh_shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    # Meshes of two ranks are equal to torch, which would answer with the mesh of the rank played before.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
    try:
        yield init_device_mesh("cpu", mesh_shape)
    finally:
        dist.destroy_process_group()


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(tuple(shape))


def test_the_examples_in_the_docstrings_are_true() -> None:
    outcome = doctest.testmod(ragged)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def local_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[torch.Tensor, int]:
    """The flat local tensor by the definition: the other placements first, then the units; and the number of copies."""
    at = next(i for i, p in enumerate(placements) if isinstance(p, RaggedShard))
    own = placements[at]
    assert isinstance(own, RaggedShard)
    rest = [Replicate() if i == at else p for i, p in enumerate(placements)]
    block = distribute_tensor(whole, mesh, rest, src_data_rank=None).to_local()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    prefix = block.shape[: len(own.dims)]
    cells = block.reshape(math.prod(prefix), -1)
    if not own.dims:
        cells = cells.repeat_interleave(sum(own.local_units), 0)[: sum(own.local_units)]
    per_unit = len(cells) // sum(own.local_units)
    first = sum(own.local_units[: coordinate[at]]) * per_unit
    mine = cells[first : first + own.local_units[coordinate[at]] * per_unit]
    if not own.dims:
        mine = mine[:1]
    copies = math.prod(n for i, n in enumerate(mesh.shape) if isinstance(placements[i], Replicate))
    return mine.reshape(-1).clone(), copies


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape"),
    [
        ((3,), [RaggedShard((0,), (1, 0, 2))], (6, 4)),
        ((3,), [RaggedShard((0, 1), (5, 1, 6))], (4, 3, 2)),
        ((3,), [RaggedShard((0, 1, 2), (7, 6, 11))], (2, 3, 4)),
        ((3,), [RaggedShard((), (0, 4, 0))], (3, 5)),
        ((2,), [RaggedShard((0,), (1, 2))], (3, 0)),
        ((2, 3), [Replicate(), RaggedShard((0,), (1, 2, 3))], (6, 2)),
        ((3, 2), [RaggedShard((0,), (1, 2, 0)), Shard(0)], (12, 2)),
        ((3, 2), [RaggedShard((0,), (1, 2, 0)), Shard(1)], (6, 5)),
        ((2, 2), [RaggedShard((0, 1), (3, 1)), _StridedShard(0, split_factor=2)], (8, 2)),
        ((2, 2), [RaggedShard((0, 1), (3, 1)), _StridedShard(1, split_factor=2)], (2, 8)),
        ((2, 2, 2), [Replicate(), RaggedShard((0, 1), (5, 3)), Shard(2)], (2, 4, 3)),
    ],
)
def test_chunks_of_all_ranks_are_what_the_units_say(
    mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> None:
    held = [0] * math.prod(shape)
    copies = 0
    for rank in range(math.prod(mesh_shape)):
        with playing(rank, mesh_shape) as mesh:
            flat, copies = local_of(numbered(shape), mesh, placements)
            shards = local_shards(from_local(flat, mesh, placements, shape), key="w")
            assert shards.global_shape == shape
            seen = []
            for chunk in shards.chunks:
                view = shards.view(chunk)
                box = tuple(slice(a, b) for a, b in zip(chunk.box.offsets, chunk.box.stops, strict=True))
                assert torch.equal(view, numbered(shape)[box])
                assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                seen += view.reshape(-1).tolist()
            assert sorted(seen) == sorted(flat.tolist())
            for cell in seen:
                held[cell] += 1
    assert held == [copies] * math.prod(shape)


def test_a_stretch_of_k_prefix_dimensions_is_at_most_2k_minus_1_chunks() -> None:
    with playing(1, (3,)) as mesh:
        placement = RaggedShard((0, 1, 2), (7, 50, 7))
        shards = local_shards(from_local(torch.zeros(100), mesh, [placement], (4, 4, 4, 2)), key="w")
        assert len(shards.chunks) == 5


@pytest.mark.parametrize(
    ("dims", "units", "says"),
    [
        ((1,), (1, 1), r"must be \(0,\)"),
        ((1, 0), (1, 1), r"must be \(0,\)"),
        ((0,), (1, -1), "none negative"),
        ((0,), (0, 0), "not all 0"),
        ((), (1, 1), "exactly one may have units"),
    ],
)
def test_units_and_dims_that_mean_nothing_are_refused(dims: tuple[int, ...], units: tuple[int, ...], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        RaggedShard(dims, units)


@pytest.mark.parametrize(
    ("placements", "shape", "elements", "says"),
    [
        ([Replicate(), RaggedShard((0,), (1, 2))], (4, 2), 4, r"4 cells .* into 3 units, which leaves 1 over"),
        ([Replicate(), RaggedShard((0,), (1, 2, 3))], (6, 2), 4, "3 local_units for a mesh dimension of 2 ranks"),
        ([Replicate(), RaggedShard((0,), (1, 2))], (6, 2), 5, r"flat tensor of 4 elements; found one of shape \(5,\)"),
        ([Shard(1), RaggedShard((0,), (1, 2))], (6, 2), 2, "only Replicate may stand before"),
        ([RaggedShard((0,), (1, 2)), RaggedShard((0,), (1, 2))], (6, 2), 2, "two ragged placements"),
        ([Replicate(), RaggedShard((0, 1), (1, 2))], (6,), 2, "needs 2 dimensions"),
        ([Replicate(), RaggedShard((), (0, 1))], (), 0, "0-dim tensor"),
        ([RaggedShard((0,), (1, 2)), Shard(3)], (6, 2), 2, "sharded on dimension 3, and has 2 dimensions"),
        ([RaggedShard((0,), (1, 2))], (6, 2), 4, "needs as many placements"),
        ([Replicate(), Shard(0)], (6, 2), 6, "is ragged; use DTensor.from_local"),
    ],
)
def test_a_local_tensor_that_does_not_fit_its_placements_is_refused(
    placements: list[Placement], shape: tuple[int, ...], elements: int, says: str
) -> None:
    with playing(0, (2, 2)) as mesh, pytest.raises(InvalidArgumentError, match=says):
        from_local(torch.zeros(elements), mesh, placements, shape)


def test_a_tensor_on_another_kind_of_device_than_the_mesh_is_refused() -> None:
    with playing(0, (1,)) as mesh, pytest.raises(InvalidArgumentError, match="on meta and the mesh is of cpu"):
        from_local(torch.zeros(2, device="meta"), mesh, [RaggedShard((0,), (1,))], (2,))


def test_the_carrier_is_a_leaf_that_shares_memory_and_can_be_a_parameter_with_optimizer_state() -> None:
    with playing(1, (2,)) as mesh:
        flat = torch.zeros(8, requires_grad=True)
        carrier = from_local(flat, mesh, [RaggedShard((0,), (1, 2))], (3, 4))
        assert isinstance(carrier, DTensor)
        assert carrier.is_leaf
        assert carrier.requires_grad
        assert carrier.shape == (3, 4)
        parameter: torch.Tensor = nn.Parameter(carrier)
        moment = torch.zeros_like(parameter)
        for tensor in (parameter, moment, parameter.detach()):
            assert isinstance(tensor, DTensor)
            with torch.no_grad():
                assert tensor.to_local().shape == (8,)
            assert [chunk.box.sizes for chunk in local_shards(tensor, key="w").chunks] == [(2, 4)]
        with torch.no_grad():
            carrier.to_local().fill_(5)
        assert flat.eq(5).all()
        assert tie_key(parameter) == tie_key(carrier)


def test_a_rank_outside_the_mesh_brings_no_elements() -> None:
    with playing(3, (4,)):
        part = DeviceMesh("cpu", [0, 1], _init_backend=False)
        placements = [RaggedShard((0,), (1, 2))]
        assert local_shards(from_local(torch.zeros(0), part, placements, (3, 4)), key="w").chunks == ()
        with pytest.raises(InvalidArgumentError, match="flat tensor of 0 elements"):
            from_local(torch.zeros(4), part, placements, (3, 4))


class VeRagged(Placement):
    """A ragged placement of another library: no base of ours, lists for fields, not hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, dims: list[int], local_units: list[int]) -> None:
        super().__init__()
        self.dims = dims
        self.local_units = local_units

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VeRagged)


def test_any_placement_with_dims_and_local_units_is_understood() -> None:
    with playing(1, (2,)) as mesh:
        carriers = [from_local(torch.arange(8), mesh, [VeRagged([0], [n, 2 * n])], (3, 4)) for n in (1,)]
        (chunk,) = local_shards(carriers[0], key="w").chunks
        assert (chunk.box.offsets, chunk.box.sizes) == ((1, 0), (2, 4))
        # Its equality ignores the units; ours must not be fooled into the geometry of the first.
        swapped = from_local(torch.arange(4), mesh, [VeRagged([0], [2, 1])], (3, 4))
        assert [c.box.offsets for c in local_shards(swapped, key="w").chunks] == [(2, 0)]
        assert hash(tie_key(swapped)) != hash(tie_key(carriers[0]))


def test_units_that_no_longer_fit_are_reported_with_the_key() -> None:
    with playing(0, (2,)) as mesh:
        placement = VeRagged([0], [1, 2])
        carrier = from_local(torch.arange(4), mesh, [placement], (3, 4))
        placement.local_units = [1, 3]
        with pytest.raises(StateDictError, match=r"^block\.w: .*3 cells .* into 4 units"):
            local_shards(carrier, key="block.w")


def test_placements_compare_hash_copy_and_pickle_by_value() -> None:
    placement = RaggedShard((0, 1), (1, 2))
    assert placement == RaggedShard([0, 1], [1, 2])
    assert placement != RaggedShard((0,), (1, 2))
    assert placement != RaggedShard((0, 1), (2, 1))
    assert placement != Shard(0)
    assert len({placement, RaggedShard((0, 1), (1, 2))}) == 1
    assert copy.deepcopy(placement) == pickle.loads(pickle.dumps(placement)) == placement
    assert repr(placement) == "RaggedShard(dims=(0, 1), local_units=(1, 2))"
    assert not dataclasses.is_dataclass(RaggedShard)
