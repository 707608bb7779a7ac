"""Allocated states lie on the ranks as their parameters do, whatever the layout they were saved under."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

import hpdcp
from hpdcp._state.geometry import Box
from hpdcp._state.ragged import RaggedShard, from_local
from hpdcp._state.sharding import local_shards

ROWS, COLUMNS = 7, 4


@contextmanager
def playing(rank: int, world: int) -> Iterator[None]:
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """An AdamW over one unsharded parameter, and what it stored as the first moment."""
    torch.manual_seed(3)
    parameter = nn.Parameter(torch.randn(ROWS, COLUMNS))
    optimizer = AdamW([parameter])
    (parameter * parameter).sum().backward()
    optimizer.step()
    optimizer.state[parameter]["row_mean"] = torch.arange(float(ROWS))
    hpdcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    return tmp_path, optimizer.state[parameter]["exp_avg"]


def assert_loads(parameter: torch.Tensor, checkpoint: tuple[Path, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Allocate and load the state of `parameter` on the rank that is played; its states."""
    path, whole = checkpoint
    optimizer = AdamW([parameter])
    assert hpdcp.allocate_optimizer_state(optimizer, checkpoint_id=path, no_dist=True) == 4
    state = optimizer.state[parameter]
    hpdcp.load({"optimizer": optimizer.state_dict()}, checkpoint_id=path, no_dist=True)
    mine, parameters = local_shards(state["exp_avg"], key="exp_avg"), local_shards(parameter, key="parameter")
    assert mine.chunks == parameters.chunks
    for chunk in mine.chunks:
        assert torch.equal(mine.view(chunk), whole[slices(chunk.box)])
    return dict(state)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))


@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [_StridedShard(0, split_factor=2), Shard(0)]],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_dtensor_keeps_mesh_and_placements(
    rank: int, placements: Sequence[Placement], checkpoint: tuple[Path, torch.Tensor]
) -> None:
    with playing(rank, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        whole = DTensor.from_local(torch.zeros(ROWS, COLUMNS), mesh, [Replicate()] * 2, run_check=False)
        parameter = nn.Parameter(whole.redistribute(mesh, placements))
        state = assert_loads(parameter, checkpoint)
        assert isinstance(state["exp_avg"], DTensor)
        assert state["exp_avg"].placements == tuple(placements)
        assert state["exp_avg"].device_mesh == mesh
        assert state["exp_avg"].shape == parameter.shape
        assert isinstance(state["row_mean"], DTensor)
        assert state["row_mean"].placements == (Replicate(), Replicate())
        assert torch.equal(state["row_mean"].to_local(), torch.arange(float(ROWS)))
        assert type(state["step"]) is torch.Tensor
        assert state["step"] == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_ragged_parameter_has_ragged_states(rank: int, checkpoint: tuple[Path, torch.Tensor]) -> None:
    units = (2, 0, 5)
    with playing(rank, 3):
        mesh = init_device_mesh("cpu", (3,))
        local = torch.zeros(units[rank] * COLUMNS)
        parameter = nn.Parameter(from_local(local, mesh, [RaggedShard((0,), units)], (ROWS, COLUMNS)))
        state = assert_loads(parameter, checkpoint)
        assert isinstance(state["exp_avg"], DTensor)
        assert state["exp_avg"].placements == (RaggedShard((0,), units),)


def test_a_plain_tensor_that_is_a_chunk_has_chunks_for_states(checkpoint: tuple[Path, torch.Tensor]) -> None:
    parameter = nn.Parameter(torch.zeros(3, COLUMNS))
    info = hpdcp.ChunkInfo(hpdcp.ChunkStorageMetadata((2, 0), (3, COLUMNS)), (ROWS, COLUMNS))
    setattr(parameter, hpdcp.CHUNK_INFO, info)
    state = assert_loads(parameter, checkpoint)
    assert getattr(state["exp_avg"], hpdcp.CHUNK_INFO) == info
    assert state["exp_avg"].shape == (3, COLUMNS)
