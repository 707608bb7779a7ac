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
        on_bytes: told of each so many bytes that were handed out to be written.
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
        self._streamer.check([StreamRequest(row, box) for row, box in mine])
        entries = [metadata.entries[row] for row in range(len(metadata.entries))]
        items = [
            WriteItem(
                MetadataIndex(entries[row].fqn, box.offsets, box.sizes, entries[row].owner),
                EntryKind.TENSOR,
                box.volume * self._streamer.dtype(row).itemsize,
            )
            for row, box in mine
        ]
        self._row_of = {(item.index.fqn, item.index.owner): row for item, (row, _) in zip(items, mine, strict=True)}
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


def requests_of_all(metadata: Metadata) -> list[StreamRequest]:
    """All that a conversion stores, by whatever rank."""
    return [StreamRequest(row, box) for row, box in shares(metadata, 1)[0]]


def shares(metadata: Metadata, world_size: int) -> list[list[tuple[int, Box]]]:
    """For each rank, the boxes of entries (by row) that it writes: all tensors once, about as many bytes each."""
    entries = metadata.entries
    rows = np.flatnonzero((entries.kinds == EntryKind.TENSOR) & (entries.volumes() > 0)).tolist()
    nbytes = np.zeros(len(entries), dtype=np.int64)
    np.add.at(nbytes, metadata.chunks.entry, metadata.storage.length)
    most = max(_LEAST_SHARE, -(-int(nbytes[rows].sum()) // world_size))
    pieces: list[tuple[int, int, Box]] = []
    for row in rows:
        parts = 1 if world_size == 1 else min(world_size, -(-int(nbytes[row]) // most))
        whole = Box.whole(entries.shape(row))
        pieces += [(int(nbytes[row]) * box.volume // whole.volume, row, box) for box in _by_rows(whole, parts)]
    pieces.sort(key=lambda piece: (-piece[0], piece[1:]))
    found: list[list[tuple[int, Box]]] = [[] for _ in range(world_size)]
    ranks = assign_evenly((size for size, _, _ in pieces), world_size)
    for rank, (_, row, box) in zip(ranks, pieces, strict=True):
        found[rank].append((row, box))
    return found


def _by_rows(box: Box, parts: int) -> Iterator[Box]:
    """The box in about so many parts along its first dimension that can be cut."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), None)
    if axis is None or parts == 1:
        yield box
        return
    rows = box.sizes[axis]
    parts = min(parts, rows)
    for number in range(parts):
        begin, end = rows * number // parts, rows * (number + 1) // parts
        sizes = (*box.sizes[:axis], end - begin, *box.sizes[axis + 1 :])
        yield Box((*box.offsets[:axis], box.offsets[axis] + begin, *box.offsets[axis + 1 :]), sizes)
