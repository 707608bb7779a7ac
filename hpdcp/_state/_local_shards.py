"""The chunks that a rank holds of one tensor, and the memory each of them lies in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpdcp._state.geometry import Box
from hpdcp._state.views import view_of_box


@dataclass(frozen=True, slots=True)
class FlatSpan:
    """Elements `[start, stop)` of a flat local tensor."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LocalChunk:
    """One box of the global tensor that this rank holds."""

    box: Box
    """Global coordinates; never empty."""
    local: Box | FlatSpan
    """Where it lies in its local tensor: a box of it, or a span of its elements in row-major order."""
    tensor: int = 0
    """Which of the local tensors; most tensors have one."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalShards:
    """What this rank holds of one tensor."""

    dtype: torch.dtype
    """As this rank sees it. Where `chunks` is empty nothing vouches for it: a wrapper of no shards says float32."""
    global_shape: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    """The plain local tensors, detached, in the memory of the original; at least one unless the rank holds none."""
    chunks: tuple[LocalChunk, ...]
    """Disjoint, and together all this rank holds; none for an empty shard or on a rank outside the mesh."""

    def view(self, chunk: LocalChunk) -> torch.Tensor:
        """The memory of one of `chunks` as a tensor of shape `chunk.box.sizes`, strided as the local tensor is."""
        local, where, sizes = self.tensors[chunk.tensor], chunk.local, chunk.box.sizes
        if isinstance(where, FlatSpan):
            return local.view(-1)[where.start : where.stop].view(sizes)
        return view_of_box(local, where.offsets, where.sizes)
