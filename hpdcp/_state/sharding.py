"""From a tensor to the chunks this rank holds of it, and the memory each of them lies in."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from hpdcp._base.errors import InvalidArgumentError, StateDictError, UnsupportedTypeError
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo
from hpdcp._state._chunked import Chunked, filled_shards, is_chunked
from hpdcp._state._dense import dense
from hpdcp._state._dtensor_layout import dtensor_layout
from hpdcp._state._local_shards import FlatSpan, LocalChunk, LocalShards
from hpdcp._state._placements import KNOWN_PLACEMENTS, arrived, is_copied_view, local_tensor, normalised
from hpdcp._state.geometry import Box, intersect

__all__ = ["FlatSpan", "LocalChunk", "LocalShards", "is_copied_view", "local_shards"]


def local_shards(tensor: torch.Tensor, *, key: str) -> LocalShards:
    """The chunks of `tensor` on this rank, without talking to another.

    Knows plain tensors (a chunk of everything, or the one their `CHUNK_INFO` attribute names), DTensors of any mesh
    with `Replicate`, `Shard`, `_StridedShard` and ragged placements, DTensors around a `LocalShardsWrapper`, and other
    tensor classes that answer `__create_chunk_list__` and `__get_tensor_shard__`. Of a DTensor's geometry nothing is
    asked from the tensor itself: its own `__create_chunk_list__` reports one wrong box where a rank's rows lie apart.

    Raises `UnsupportedTypeError` for what has no storage that can be written exactly (`Partial` placements, meta,
    sparse, nested, quantised and wrapper tensors) and `StateDictError` where a tensor contradicts its own description;
    both name `key`.
    """
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _shards_of_plain(tensor, key)
    if isinstance(tensor, DTensor):
        return _shards_of_dtensor(tensor, key)
    if isinstance(tensor, Chunked):
        return _shards_of_chunked(tensor, tensor.shape, tensor.dtype, key)
    return _shards_of_plain(arrived(tensor), key)


def _shards_of_plain(tensor: torch.Tensor, key: str) -> LocalShards:
    local = dense(tensor, key)
    shape = tuple(local.shape)
    info = getattr(tensor, CHUNK_INFO, None)
    if info is None:
        chunks = () if 0 in shape else (_whole(shape),)
        return LocalShards(local.dtype, shape, (local,), chunks)
    box, global_shape = _described_box(info, shape, key)
    chunks = () if box.is_empty else (LocalChunk(box, Box.whole(shape)),)
    return LocalShards(local.dtype, global_shape, (local,), chunks)


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> LocalChunk:
    box = Box.whole(shape)
    return LocalChunk(box, box)


def _described_box(info: object, shape: tuple[int, ...], key: str) -> tuple[Box, tuple[int, ...]]:
    """The box and the global shape that a plain tensor's `CHUNK_INFO` gives it."""
    if not isinstance(info, ChunkInfo):
        raise StateDictError(f"{key}: its attribute {CHUNK_INFO} must be a ChunkInfo; found {type(info).__qualname__}.")
    box = _box(info.chunk.offsets, info.chunk.sizes, key)
    if box.sizes != shape:
        raise StateDictError(
            f"{key}: its ChunkInfo describes a chunk of sizes {box.sizes}, and the tensor has shape {shape}. "
            "Attach one that describes this tensor."
        )
    global_shape = tuple(int(size) for size in info.global_shape)
    _check_inside(box, global_shape, key)
    return box, global_shape


def _box(offsets: Iterable[int], sizes: Iterable[int], key: str) -> Box:
    box = Box(tuple(int(n) for n in offsets), tuple(int(n) for n in sizes))
    if len(box.offsets) != len(box.sizes):
        raise StateDictError(f"{key}: a chunk has offsets {box.offsets} and sizes {box.sizes}, of different lengths.")
    return box


def _check_inside(box: Box, global_shape: tuple[int, ...], key: str) -> None:
    if box.ndim != len(global_shape) or any(
        offset < 0 or stop > size for offset, stop, size in zip(box.offsets, box.stops, global_shape, strict=True)
    ):
        raise StateDictError(
            f"{key}: the chunk at {box.offsets} of sizes {box.sizes} lies outside the global shape {global_shape}."
        )


def _shards_of_chunked(source: Chunked, shape: Sequence[int], dtype: torch.dtype, key: str) -> LocalShards:
    global_shape = tuple(shape)
    tensors: list[torch.Tensor] = []
    chunks: list[LocalChunk] = []
    for offsets, sizes, shard in filled_shards(source, key):
        box = _box(offsets, sizes, key)
        _check_inside(box, global_shape, key)
        local = dense(shard, key)
        if tuple(local.shape) != box.sizes:
            raise StateDictError(
                f"{key}: the shard for the chunk at {box.offsets} of sizes {box.sizes} has shape {tuple(local.shape)}."
            )
        if any(intersect(box, other.box) is not None for other in chunks):
            raise StateDictError(f"{key}: the chunk at {box.offsets} of sizes {box.sizes} overlaps another one.")
        chunks.append(LocalChunk(box, Box.whole(box.sizes), len(tensors)))
        tensors.append(local)
    # The wrapper around the shards does not know their dtype: torch's says float32 whatever they are.
    found = {local.dtype for local in tensors}
    if len(found) > 1:
        raise StateDictError(f"{key}: its shards on this rank have several dtypes: {sorted(map(str, found))}.")
    return LocalShards(found.pop() if found else dtype, global_shape, tuple(tensors), tuple(chunks))


def _shards_of_dtensor(tensor: DTensor, key: str) -> LocalShards:
    if getattr(tensor, CHUNK_INFO, None) is not None:
        raise StateDictError(f"{key}: a DTensor's placements say which box it is; remove its attribute {CHUNK_INFO}.")
    shape, mesh = tensor.shape, tensor.device_mesh
    coordinate = mesh.get_coordinate()
    placements = tensor.placements
    if not KNOWN_PLACEMENTS.issuperset(map(type, placements)):
        placements = tuple(normalised(placement, key) for placement in placements)
    try:
        layout = dtensor_layout(shape, mesh.shape, None if coordinate is None else tuple(coordinate), placements)
    except (InvalidArgumentError, UnsupportedTypeError) as cause:
        wrong = StateDictError if isinstance(cause, InvalidArgumentError) else UnsupportedTypeError
        raise wrong(f"{key}: {cause}") from cause
    if coordinate is None:
        return LocalShards(tensor.dtype, layout.global_shape, (), ())
    local = local_tensor(tensor)
    if is_chunked(local):
        return _shards_of_chunked(local, shape, tensor.dtype, key)
    local = dense(local, key)
    return LocalShards(local.dtype, layout.global_shape, (local,), layout.chunks_of(local, key))
