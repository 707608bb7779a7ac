"""Ways to lay a tensor over ranks, built without hpdcp's own geometry, to save under one and load under another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, RaggedShard
from hpdcp._state.ragged import from_local
from tests.support.job import Job


@dataclass(frozen=True)
class Layout:
    """Where each rank's part of a tensor lies; what a tensor has too few dimensions for is replicated."""

    name: str
    mesh: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    ranks: tuple[int, ...] | None = None
    """Who is in the mesh; None: everybody."""
    units: tuple[int, ...] = ()
    """Ragged over the last axis of the mesh, in these proportions."""
    plain: bool = False
    """A plain tensor: whole on every rank, or its rows by CHUNK_INFO with `units`."""

    def place(self, job: Job, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of `full`, in memory of its own."""
        if self.plain:
            return self._rows(job, full) if self.units else full.clone().to(job.device)
        mesh = job.mesh(*self.mesh, ranks=self.ranks)
        dims = _ragged_dims(full.shape, sum(self.units)) if self.units else None
        if dims is None:
            placements = [
                placement
                if not isinstance(placement, (Shard, _StridedShard)) or placement.dim < full.ndim
                else Replicate()
                for placement in self.placements
            ] or [Replicate()] * len(self.mesh)
            return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)
        coordinate = mesh.get_coordinate()
        before, mine = 0, 0
        if coordinate is not None:
            before, mine = sum(self.units[: coordinate[-1]]), self.units[coordinate[-1]]
        unit = full.numel() // sum(self.units)
        local = full.reshape(-1)[unit * before : unit * (before + mine)].clone().to(job.device)
        placements = [Replicate()] * (len(self.mesh) - 1) + [RaggedShard(dims, self.units)]
        return from_local(local, mesh, placements, tuple(full.shape))

    def _rows(self, job: Job, full: torch.Tensor) -> torch.Tensor:
        if full.ndim == 0 or full.shape[0] % sum(self.units):
            return full.clone().to(job.device)
        unit = full.shape[0] // sum(self.units)
        start, rows = unit * sum(self.units[: job.rank]), unit * self.units[job.rank]
        part = full[start : start + rows].clone().to(job.device)
        offsets = (start, *[0] * (full.ndim - 1))
        chunk = ChunkStorageMetadata(offsets, tuple(part.shape))
        setattr(part, CHUNK_INFO, ChunkInfo(chunk, tuple(full.shape)))
        return part

    def place_all(self, job: Job, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`place` for each."""
        return {name: self.place(job, full) for name, full in tensors.items()}

    def blank_all(self, job: Job, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Targets of the same layout that hold nothing but this rank's sentinel."""
        placed = self.place_all(job, tensors)
        for tensor in placed.values():
            local_of(tensor).fill_(job.sentinel())
        return placed

    def __str__(self) -> str:
        return self.name


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor on this rank, in the tensor's own memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def differing(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors whose parts on this rank are not the same, element for element."""
    return [
        name
        for name, tensor in expected.items()
        if not torch.equal(local_of(tensor).cpu(), local_of(found[name]).cpu())
    ]


def _ragged_dims(shape: Sequence[int], units: int) -> tuple[int, ...] | None:
    """The fewest leading dimensions that `units` divides; None where none do."""
    for count in range(1, len(shape) + 1):
        cells = math.prod(shape[:count])
        if cells and cells % units == 0:
            return tuple(range(count))
    return None


REPLICATED: Final = Layout("replicated", (4,), (Replicate(),))
TP4: Final = Layout("TP4", (4,), (Shard(0),))
TP4_COLUMNS: Final = Layout("TP4 on columns", (4,), (Shard(1),))
TP2: Final = Layout("TP2 on two of the ranks", (2,), (Shard(0),), ranks=(0, 1))
DP2_TP2: Final = Layout("DP2 x TP2", (2, 2), (Replicate(), Shard(0)))
DP2_TP2_COLUMNS: Final = Layout("DP2 x TP2 on columns", (2, 2), (Replicate(), Shard(1)))
FSDP4: Final = Layout("FSDP over 4", (4,), (Shard(0),))
FSDP2: Final = Layout("FSDP over 2", (2,), (Shard(0),), ranks=(2, 3))
HSDP: Final = Layout("HSDP", (2, 2), (Replicate(), Shard(0)))
FSDP_TP: Final = Layout("FSDP x TP on two dims", (2, 2), (Shard(0), Shard(1)))
FSDP_TP_SAME: Final = Layout("FSDP x TP on one dim", (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
NESTED: Final = Layout("twice on one dim", (2, 2), (Shard(0), Shard(0)))
CUBE: Final = Layout("three axes", (2, 1, 2), (Shard(1), Replicate(), Shard(0)))
CUBE_SHARDED: Final = Layout("three axes, all sharded", (1, 2, 2), (Shard(2), Shard(0), Shard(1)))
ODD_RANKS: Final = Layout("a sub-mesh of ranks 1 and 3", (2,), (Shard(1),), ranks=(1, 3))
ONE_RANK: Final = Layout("a sub-mesh of rank 2", (1,), (Replicate(),), ranks=(2,))
RAGGED: Final = Layout("ragged 1:0:2:3", (4,), units=(1, 0, 2, 3))
RAGGED_PAIRS: Final = Layout("replicated, ragged 2:1", (2, 2), units=(2, 1))
PLAIN: Final = Layout("plain tensors", plain=True)
CHUNKED: Final = Layout("plain tensors with CHUNK_INFO", units=(2, 0, 1, 3), plain=True)

LAYOUTS: Final = (
    REPLICATED, TP4, TP4_COLUMNS, TP2, DP2_TP2, DP2_TP2_COLUMNS, FSDP2, FSDP_TP, FSDP_TP_SAME, NESTED, CUBE,
    CUBE_SHARDED, ODD_RANKS, ONE_RANK, RAGGED, RAGGED_PAIRS, PLAIN, CHUNKED,
)  # fmt: skip
"""One of each kind; those that differ from another in name only are left out."""


def sample_tensors() -> dict[str, torch.Tensor]:
    """Full tensors of awkward shapes, every element different from every other."""
    shapes = {
        "even": (12, 8),
        "uneven": (6, 5),
        "short": (3, 2),
        "vector": (12,),
        "cube": (4, 3, 5),
        "row": (1, 7),
        "scalar": (),
        "nothing": (0, 4),
    }
    start = 0
    tensors = {}
    for name, shape in shapes.items():
        count = math.prod(shape)
        tensors[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return tensors
