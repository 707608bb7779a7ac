"""Which tensors are the same memory: tied weights, which are stored once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo
from hpdcp._state._chunked import Chunked, filled_shards, is_chunked
from hpdcp._state._placements import KNOWN_PLACEMENTS, local_tensor


class _View(NamedTuple):
    """Memory, and how it is seen."""

    device: torch.device
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool


def tie_key(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors exactly when they are the same memory, seen the same way; None where there is no memory.

    A DTensor's mesh, placements and global shape count, a plain tensor's `CHUNK_INFO` counts, `requires_grad` does not.
    None means "tied to nothing": zero elements (here: a rank's empty shard too), or no storage of its own.
    """
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    view = _tie_of_shards(local) if is_chunked(local) else _view_key(local)
    if view is None:
        return None
    if isinstance(tensor, DTensor):
        # A placement of another library need not be hashable; what it prints is all that is asked of it.
        placements = tuple(p if type(p) in KNOWN_PLACEMENTS else repr(p) for p in tensor.placements)
        return (view, tensor.device_mesh, placements, tensor.shape)
    info = getattr(tensor, CHUNK_INFO, None)
    return (view, (*info.chunk.offsets, *info.global_shape) if isinstance(info, ChunkInfo) else None)


def address_in(tie: Hashable) -> int | None:
    """Where the memory of a `tie_key` begins; None where it is several memories, or none."""
    view = tie[0] if isinstance(tie, tuple) else None
    return view.address if isinstance(view, _View) else None


def _view_key(tensor: torch.Tensor) -> Hashable:
    plain = type(tensor) is torch.Tensor or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not plain or is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    try:
        address = tensor.data_ptr() if tensor.numel() else 0
    except RuntimeError:
        return None
    if not address:
        return None
    return _View(
        tensor.device,
        address,
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _tie_of_shards(source: Chunked) -> Hashable:
    views = [(tuple(offsets), _view_key(shard)) for offsets, _, shard in filled_shards(source, "")]
    return tuple(views) if views and all(view is not None for _, view in views) else None
