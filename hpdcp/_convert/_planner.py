"""Saves what another checkpoint stores: a planner whose state is never in memory.

Ranks share the tensors by their bytes; each streams its own from the source while they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._base.splitting import assign_evenly
from hpdcp._convert.tensor_streams import StreamRequest, TensorStream, TensorStreamer
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.replicas import drop_duplicates
from hpdcp._plan.save_plan import SavePlan, WriteItem
from hpdcp._state.geometry import Box

_LEAST_SHARE: Final = 64 << 20
"""A tensor is written by one rank unless it is larger than this, and than a rank's fair share of all bytes."""


class ConversionPlanner(SavePlanner):
    """Stores the tensors of a streamer, under their names, each as one chunk, or a few where it is a large part of all.

    Args:
        streamer: whose metadata holds tensors and aliases only.
        on_bytes: told of each so many bytes that are about to be written.
    """

    def __init__(self, streamer: TensorStreamer, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        self._streamer = streamer
        self._on_bytes = on_bytes
        self._expected: list[WriteItem] = []
        self._next = 0
        self._stream: TensorStream | None = None

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        self._context = context

    def build_local_plan(self) -> SavePlan:
        metadata = self._streamer.metadata
        mine = shares(metadata, self._context.world_size)[self._context.rank]
        self._streamer.check(mine)
        entries = [metadata.entries[row] for row in range(len(metadata.entries))]
        items = [
            WriteItem(
                MetadataIndex(entries[each.row].fqn, each.box.offsets, each.box.sizes, entries[each.row].owner),
                EntryKind.TENSOR,
                each.box.volume * self._streamer.dtype(each.row).itemsize,
            )
            for each in mine
        ]
        self._row_of = {(item.index.fqn, item.index.owner): each.row for item, each in zip(items, mine, strict=True)}
        return SavePlan.build(entries, items)

    def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def expect(self, items: Sequence[WriteItem]) -> None:
        self.close()
        self._expected = list(items)
        self._stream = self._streamer.stream([self._request(item) for item in items])

    def get_parts(self, item: WriteItem) -> Iterator[torch.Tensor]:
        expected = self._next < len(self._expected) and self._expected[self._next] == item
        stream = self._stream if expected else None
        if stream is None:
            stream = self._streamer.stream([self._request(item)])
        self._next += expected
        left = item.nbytes
        while left:
            _, part = next(stream)
            nbytes = part.numel() * part.element_size()
            left -= nbytes
            yield part
            self._on_bytes(nbytes)

    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        return self._streamer.whole(self._request(item))

    def get_bytes(self, item: WriteItem) -> bytes:
        raise InvalidArgumentError(f"{item.index.fqn!r} is a Python value; a ConversionPlanner stores tensors only.")

    def finish_write(self) -> None:
        self.close()
        self._streamer.check_unchanged()

    def close(self) -> None:
        """Stop reading ahead."""
        if self._stream is not None:
            self._stream.close()
        self._stream, self._expected, self._next = None, [], 0

    def _request(self, item: WriteItem) -> StreamRequest:
        return StreamRequest(self._row_of[item.index.fqn, item.index.owner], Box(item.index.offsets, item.index.sizes))


def shares(metadata: Metadata, world_size: int) -> list[list[StreamRequest]]:
    """What each rank writes: all tensors once, about as many bytes each."""
    entries = metadata.entries
    rows = np.flatnonzero((entries.kinds == EntryKind.TENSOR) & (entries.volumes() > 0)).tolist()
    nbytes = np.zeros(len(entries), dtype=np.int64)
    np.add.at(nbytes, metadata.chunks.entry, metadata.storage.length)
    most = max(_LEAST_SHARE, -(-int(nbytes[rows].sum()) // world_size))
    boxes: list[tuple[int, int, Box]] = []
    for row in rows:
        count = 1 if world_size == 1 else min(world_size, -(-int(nbytes[row]) // most))
        whole = Box.whole(entries.shape(row))
        boxes += [(int(nbytes[row]) * box.volume // whole.volume, row, box) for box in _by_rows(whole, count)]
    boxes.sort(key=lambda each: (-each[0], each[1:]))
    found: list[list[StreamRequest]] = [[] for _ in range(world_size)]
    ranks = assign_evenly((size for size, _, _ in boxes), world_size)
    for rank, (_, row, box) in zip(ranks, boxes, strict=True):
        found[rank].append(StreamRequest(row, box))
    return found


def _by_rows(box: Box, count: int) -> Iterator[Box]:
    """The box as about so many boxes, cut along its first dimension that can be."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), None)
    if axis is None or count == 1:
        yield box
        return
    rows = box.sizes[axis]
    count = min(count, rows)
    for number in range(count):
        begin, end = rows * number // count, rows * (number + 1) // count
        sizes = (*box.sizes[:axis], end - begin, *box.sizes[axis + 1 :])
        yield Box((*box.offsets[:axis], box.offsets[axis] + begin, *box.offsets[axis + 1 :]), sizes)
