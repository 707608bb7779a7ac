"""What a rank holds of a DTensor, by its shape, placements and mesh alone: no tensor, no other rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor.placement_types import Placement

from hpdcp._base.errors import StateDictError
from hpdcp._state._local_shards import FlatSpan, LocalChunk
from hpdcp._state._runs import Runs, Split, boxes_from_runs, owned_runs, split_flat_interval
from hpdcp._state.geometry import Box, flat_start, intersect, is_contiguous, relative, row_runs
from hpdcp._state.ragged import RaggedShard, divisions


@dataclass(frozen=True, slots=True)
class _PlacementReading:
    """One way to understand a placement: the local shape it implies, and the chunks."""

    shape: tuple[int, ...]
    chunks: tuple[LocalChunk, ...]


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """What a rank holds of a DTensor, by its shape, placements and mesh alone."""

    global_shape: tuple[int, ...]
    reading: _PlacementReading
    other: _PlacementReading | None
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
    def _fits(local: torch.Tensor, reading: _PlacementReading) -> bool:
        if local.shape == reading.shape:
            return True
        flat = bool(reading.chunks) and isinstance(reading.chunks[0].local, FlatSpan)
        return local.numel() == math.prod(reading.shape) and (not reading.chunks or (flat and local.is_contiguous()))


def _spell(reading: _PlacementReading) -> str:
    return " and ".join(f"{chunk.box.offsets}+{chunk.box.sizes}" for chunk in reading.chunks) or "nothing"


@functools.lru_cache(maxsize=65536)
def dtensor_layout(
    shape: torch.Size,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    placements: tuple[Placement, ...],
) -> DTensorLayout:
    """What the rank at `coordinate` of the mesh holds; one outside the mesh holds nothing.

    Cached by numbers alone: two meshes that look alike hold alike, and none is kept alive for it.
    """
    global_shape = tuple(shape)
    where = coordinate or (0,) * len(mesh_shape)
    splits, ragged = divisions(placements, mesh_shape, where, len(shape))
    if coordinate is None:
        return DTensorLayout(global_shape, _PlacementReading((0,), ()), None)
    runs = owned_runs(shape, splits)
    late_runs = owned_runs(shape, _applied_last(splits))
    reading = _reading(runs, ragged)
    return DTensorLayout(global_shape, reading, None if late_runs == runs else _reading(late_runs, ragged))


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


def _reading(runs: Sequence[Runs], ragged: tuple[RaggedShard, int] | None) -> _PlacementReading:
    shape = tuple(sum(length for _, length in along) for along in runs)
    boxes = boxes_from_runs(runs)
    blocks = boxes_from_runs([_packed(along) for along in runs])
    if ragged is None:
        return _PlacementReading(shape, tuple(LocalChunk(box, block) for box, block in zip(boxes, blocks, strict=True)))
    start, stop = ragged[0].interval(shape, ragged[1])
    chunks: list[LocalChunk] = []
    for part, _ in split_flat_interval(shape, start, stop):
        for box, block in zip(boxes, blocks, strict=True):
            met = intersect(part, block)
            if met is not None:
                chunks.extend(_flat_chunks(met, shape, start, box, block))
    return _PlacementReading((stop - start,), tuple(chunks))


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
