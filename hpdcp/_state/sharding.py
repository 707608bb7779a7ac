"""From a tensor to the chunks this rank holds of it, and the memory each of them lies in."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parameter import is_lazy

from hpdcp._base.errors import InvalidArgumentError, StateDictError, UnsupportedTypeError
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo
from hpdcp._state._runs import Runs, Split, boxes_from_runs, owned_runs, split_flat_interval
from hpdcp._state.geometry import Box, flat_start, intersect, is_contiguous, relative, row_runs
from hpdcp._state.ragged import RaggedShard, as_ragged, divisions
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
    if isinstance(tensor, _Chunked):
        return _shards_of_chunked(tensor, tensor.shape, tensor.dtype, key)
    return _shards_of_plain(tensor, key)


def _plain(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """`tensor` detached, in its own memory; raises for everything that is not dense memory of its own."""
    kind = type(tensor)
    standard = kind is torch.Tensor or kind is torch.nn.Parameter
    if not standard:
        _check_class(tensor, key)
    if (
        tensor.is_meta
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        raise UnsupportedTypeError(_refusal(tensor, key))
    return tensor.detach() if standard else tensor.as_subclass(torch.Tensor).detach()


def _check_class(tensor: torch.Tensor, key: str) -> None:
    kind = type(tensor)
    if is_lazy(tensor):
        raise UnsupportedTypeError(
            f"{key}: the parameter of a lazy module has no shape yet. Run the module once, then save or load."
        )
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedTypeError(
            f"{key}: a {kind.__module__}.{kind.__qualname__} holds its values in other tensors, so it has no memory "
            "to store. Put the tensors inside it into the state dict instead."
        )


def _refusal(tensor: torch.Tensor, key: str) -> str:
    if tensor.is_meta:
        return f"{key}: the tensor is on the meta device and has no values. Materialise it first, as with to_empty()."
    if tensor.is_quantized:
        return f"{key}: quantised tensors ({tensor.dtype}) are not stored. Store int_repr() and the scales instead."
    if tensor.is_nested:
        return f"{key}: nested tensors are not stored. Store values() and offsets() instead."
    if tensor.layout is not torch.strided:
        return f"{key}: tensors of layout {tensor.layout} are not stored. Store its parts, or to_dense()."
    lazy, resolved = ("conjugate", "resolve_conj()") if tensor.is_conj() else ("negative", "resolve_neg()")
    return f"{key}: the tensor is a lazy {lazy} view, whose memory holds other values. Use {resolved} instead."


def _shards_of_plain(tensor: torch.Tensor, key: str) -> LocalShards:
    local = _plain(tensor, key)
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


@runtime_checkable
class _Chunked(Protocol):
    """What torch's own checkpoints ask of a tensor that holds several chunks."""

    def __create_chunk_list__(self) -> Sequence[_ChunkOnRecord]: ...

    def __get_tensor_shard__(self, index: object) -> torch.Tensor: ...


class _ChunkOnRecord(Protocol):
    offsets: torch.Size
    sizes: torch.Size


def _filled_shards(source: _Chunked, key: str) -> Iterator[tuple[torch.Size, torch.Size, torch.Tensor]]:
    """Offsets, sizes and tensor of every chunk that is not empty."""
    # Only those who hold such tensors pay for the import: torch's wrapper has made it already.
    from torch.distributed.checkpoint.metadata import MetadataIndex

    for number, record in enumerate(source.__create_chunk_list__()):
        # torch's wrapper of no shards reports one empty chunk, of two dimensions whatever the tensor has.
        if 0 not in record.sizes:
            yield record.offsets, record.sizes, source.__get_tensor_shard__(MetadataIndex(key, record.offsets, number))


def _shards_of_chunked(source: _Chunked, shape: Sequence[int], dtype: torch.dtype, key: str) -> LocalShards:
    global_shape = tuple(shape)
    tensors: list[torch.Tensor] = []
    chunks: list[LocalChunk] = []
    for offsets, sizes, shard in _filled_shards(source, key):
        box = _box(offsets, sizes, key)
        _check_inside(box, global_shape, key)
        local = _plain(shard, key)
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
    if not _KNOWN.issuperset(map(type, placements)):
        placements = tuple(_normalised(placement, key) for placement in placements)
    try:
        layout = _layout(shape, mesh.shape, None if coordinate is None else tuple(coordinate), placements)
    except (InvalidArgumentError, UnsupportedTypeError) as cause:
        wrong = StateDictError if isinstance(cause, InvalidArgumentError) else UnsupportedTypeError
        raise wrong(f"{key}: {cause}") from cause
    if coordinate is None:
        return LocalShards(tensor.dtype, layout.global_shape, (), ())
    local = _local_tensor(tensor)
    if type(local) is not torch.Tensor and isinstance(local, _Chunked):
        return _shards_of_chunked(local, shape, tensor.dtype, key)
    local = _plain(local, key)
    return LocalShards(local.dtype, layout.global_shape, (local,), layout.chunks_of(local, key))


_KNOWN = frozenset({Replicate, Shard, _StridedShard, RaggedShard})


def _normalised(placement: Placement, key: str) -> Placement:
    """Another library's ragged placement as ours, whose equality means equal geometry; others as they are."""
    if type(placement) in _KNOWN:
        return placement
    try:
        return as_ragged(placement) or placement
    except (InvalidArgumentError, TypeError, ValueError) as cause:
        raise StateDictError(f"{key}: its placement {placement!r} cannot be used: {cause}") from cause


def _local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself, its values arrived.

    `to_local()` gives the same object under `no_grad` and costs 9 us more otherwise, for an autograd node.
    """
    local = tensor._local_tensor
    wait = None if type(local) is torch.Tensor else getattr(local, "trigger_wait", None)
    return local if wait is None else wait()


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way to understand a placement: the local shape it implies, and the chunks."""

    shape: tuple[int, ...]
    chunks: tuple[LocalChunk, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a rank holds of a DTensor, by its shape, placements and mesh alone."""

    global_shape: tuple[int, ...]
    reading: _Reading
    other: _Reading | None
    """What `fully_shard` means by the same placements, where that differs here; see `_applied_last`."""

    def chunks_of(self, local: torch.Tensor, key: str) -> tuple[LocalChunk, ...]:
        """The chunks, once the local tensor is known to have the shape they need."""
        if self.other is None and local.shape == self.reading.shape:
            return self.reading.chunks
        readings = [self.reading] if self.other is None else [self.reading, self.other]
        fitting = [reading for reading in readings if self._fits(local, reading)]
        if len(fitting) == 1:
            return fitting[0].chunks
        if fitting:
            raise StateDictError(
                f"{key}: torch's strided placement of the uneven shape {self.global_shape} is ambiguous on this rank: "
                f"distribute_tensor puts {_spell(self.reading)} here and fully_shard puts {_spell(fitting[1])}. "
                "Choose a size that the mesh divides evenly."
            )
        raise StateDictError(
            f"{key}: its placements leave this rank a local tensor of shape "
            f"{' or '.join(str(reading.shape) for reading in readings)}; found one of shape {tuple(local.shape)}. "
            "Give DTensor.from_local the global shape where shards are uneven."
        )

    @staticmethod
    def _fits(local: torch.Tensor, reading: _Reading) -> bool:
        if local.shape == reading.shape:
            return True
        flat = bool(reading.chunks) and isinstance(reading.chunks[0].local, FlatSpan)
        return local.numel() == math.prod(reading.shape) and (not reading.chunks or (flat and local.is_contiguous()))


def _spell(reading: _Reading) -> str:
    return " and ".join(f"{chunk.box.offsets}+{chunk.box.sizes}" for chunk in reading.chunks) or "nothing"


@functools.lru_cache(maxsize=65536)
def _layout(
    shape: torch.Size,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    placements: tuple[Placement, ...],
) -> _Layout:
    """Cached by numbers alone: two meshes that look alike hold alike, and none is kept alive for it."""
    global_shape = tuple(shape)
    where = coordinate or (0,) * len(mesh_shape)
    splits, ragged = divisions(placements, mesh_shape, where, len(shape))
    if coordinate is None:
        return _Layout(global_shape, _Reading((0,), ()), None)
    runs = owned_runs(shape, splits)
    late_runs = owned_runs(shape, _applied_last(splits))
    reading = _reading(runs, ragged)
    return _Layout(global_shape, reading, None if late_runs == runs else _reading(late_runs, ragged))


def _applied_last(splits: Sequence[Split]) -> list[Split]:
    """The divisions as `fully_shard` makes them; the same as `splits` where it notes them as it makes them.

    FSDP2 over tensor parallelism on one dimension divides what tensor parallelism left, and notes it *before* that as
    `_StridedShard` with as many pieces as there are later shards. Read as written that gives the same rows while shards
    are even and often beyond, yet not always: of 7 rows on 3 x 2 ranks, rank (2, 0) is left row 6 by the notation and
    nothing by `fully_shard` (measured, torch 2.13).
    """
    if all(split.pieces == 1 for split in splits):
        return list(splits)
    dims = dict.fromkeys(split.dim for split in splits)
    return [split for dim in dims for split in _later_first([split for split in splits if split.dim == dim])]


def _later_first(splits: list[Split]) -> list[Split]:
    """One dimension's divisions, each strided one after all those it counts as its pieces."""
    order: list[Split] = []
    later = 1
    for split in reversed(splits):
        if split.pieces == 1:
            order.insert(0, split)
        elif split.pieces == later:
            order.append(Split(split.dim, split.parts, split.index))
        else:
            return splits
        later *= split.parts
    return order


def _reading(runs: Sequence[Runs], ragged: tuple[RaggedShard, int] | None) -> _Reading:
    shape = tuple(sum(length for _, length in along) for along in runs)
    boxes = boxes_from_runs(runs)
    blocks = boxes_from_runs([_packed(along) for along in runs])
    if ragged is None:
        return _Reading(shape, tuple(LocalChunk(box, block) for box, block in zip(boxes, blocks, strict=True)))
    start, stop = ragged[0].interval(shape, ragged[1])
    chunks: list[LocalChunk] = []
    for part, _ in split_flat_interval(shape, start, stop):
        for box, block in zip(boxes, blocks, strict=True):
            met = intersect(part, block)
            if met is not None:
                chunks.extend(_flat_chunks(met, shape, start, box, block))
    return _Reading((stop - start,), tuple(chunks))


def _packed(runs: Runs) -> Runs:
    """Where the runs lie once they are pushed together, as a local tensor holds them."""
    packed: list[tuple[int, int]] = []
    start = 0
    for _, length in runs:
        packed.append((start, length))
        start += length
    return tuple(packed)


def _flat_chunks(met: Box, shape: tuple[int, ...], start: int, box: Box, block: Box) -> Iterable[LocalChunk]:
    """`met` (inside `block` of the packed shape) as chunks that are each one span of the flat local tensor."""
    if is_contiguous(met, shape):
        pieces = [(met, flat_start(met, shape))]
    else:
        begins, length = row_runs(met, shape)
        pieces = [piece for begin in begins.tolist() for piece in split_flat_interval(shape, begin, begin + length)]
    for piece, at in pieces:
        inside = relative(piece, block)
        offsets = tuple(a + b for a, b in zip(inside.offsets, box.offsets, strict=True))
        yield LocalChunk(Box(offsets, piece.sizes), FlatSpan(at - start, at - start + piece.volume))


def tie_key(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors exactly when they are the same memory, seen the same way; None where there is no memory.

    A DTensor's mesh, placements and global shape count, a plain tensor's `CHUNK_INFO` counts, `requires_grad` does not.
    None means "tied to nothing": zero elements (here: a rank's empty shard too), or no storage of its own.
    """
    local = _local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if type(local) is not torch.Tensor and isinstance(local, _Chunked):
        view = _tie_of_shards(local)
    else:
        view = _view_key(local)
    if view is None:
        return None
    if isinstance(tensor, DTensor):
        # A placement of another library need not be hashable; what it prints is all that is asked of it.
        placements = tuple(p if type(p) in _KNOWN else repr(p) for p in tensor.placements)
        return (view, tensor.device_mesh, placements, tensor.shape)
    info = getattr(tensor, CHUNK_INFO, None)
    return (view, (*info.chunk.offsets, *info.global_shape) if isinstance(info, ChunkInfo) else None)


def _view_key(tensor: torch.Tensor) -> Hashable:
    plain = type(tensor) is torch.Tensor or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not plain or is_lazy(tensor) or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    if not tensor.numel():
        return None
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _tie_of_shards(source: _Chunked) -> Hashable:
    views = [(tuple(offsets), _view_key(shard)) for offsets, _, shard in _filled_shards(source, "")]
    return tuple(views) if views and all(view is not None for _, view in views) else None
