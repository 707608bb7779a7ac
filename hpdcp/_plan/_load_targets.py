"""The memory that a load fills: which plan fills it, which of it is tied, and what of it overlaps."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hpdcp._devices import device
from hpdcp._devices.memory import memory_range
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan.load_plan import LoadPlan, PlannedItems
from hpdcp._plan.read_items import LoadTarget, ReadItem
from hpdcp._plan.straight_reads import StraightReads
from hpdcp._state.dtypes import dtype_name
from hpdcp._state.geometry import Box, relative
from hpdcp._state.overlaps import meeting_groups, shared_elements
from hpdcp._state.sharding import LocalChunk, LocalShards, local_shards
from hpdcp._state.ties import address_in, tie_key
from hpdcp._state.views import view_of_box


@dataclass(frozen=True, slots=True, eq=False)
class _Filled:
    """One local tensor that is filled."""

    fqn: str
    tensor: torch.Tensor
    chunks: tuple[LocalChunk, ...]


class LoadTargets:
    """Straight reads, as columns, and what else a load fills, one by one."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._straight: StraightReads | None = None
        self._plan: LoadPlan | None = None
        self._memory: dict[MetadataIndex, torch.Tensor] = {}
        self._items: list[ReadItem] = []
        self._shareable: list[LoadTarget] = []
        self._filled: list[_Filled] = []
        self._ties: dict[Hashable, tuple[str, int]] = {}

    def add_straight(self, reads: StraightReads) -> None:
        """Take all that is read straight; once, before anything else is added."""
        self._straight = reads

    def add(
        self, index: MetadataIndex, memory: torch.Tensor, box: Box, overlaps: Sequence[tuple[int, Box, Box]]
    ) -> None:
        """Fill `memory`, the box of `index`, from the stored boxes that overlap it."""
        self._memory[index] = memory
        self._items += [_read_item(index, box, *overlap) for overlap in overlaps]

    def share(self, index: MetadataIndex, dtype: torch.dtype) -> None:
        """What was added under `index` is filled all over, with what other ranks may want as well."""
        memory = self._memory[index]
        on_device = device.is_current(memory)
        reached = on_device or device.is_host(memory)
        direct = reached and memory.is_contiguous() and not (memory.is_conj() or memory.is_neg())
        self._shareable.append(LoadTarget(index, dtype_name(dtype), direct, on_device))

    def note_filled(self, fqn: str, shards: LocalShards) -> None:
        """The local tensors of this target are filled, for `overlapping`."""
        if shards.chunks:
            self._filled += [_Filled(fqn, tensor, shards.chunks) for tensor in shards.tensors]

    def first_of_tie(self, tie: Hashable, fqn: str, row: int) -> tuple[str, int]:
        """The name and the stored entry that fill a memory: what came first with this `tie_key`, or these."""
        self._note_straight(tie)
        return self._ties.setdefault(tie, (fqn, row))

    def is_filled(self, tie: Hashable) -> bool:
        """Whether something fills the memory of this `tie_key`."""
        self._note_straight(tie)
        return tie in self._ties

    def _note_straight(self, tie: Hashable) -> None:
        """Of straight reads, no two of which are tied, keys are made only where another target has the address."""
        row = self._straight_rows_by_address.get(address_in(tie))
        if row is not None:
            assert self._straight is not None
            leaf = self._straight.wanted.leaves[row]
            entry = int(self._metadata.chunks.entry[self._straight.storage_rows[row]])
            self._ties.setdefault(tie_key(leaf.value), (leaf.fqn, entry))

    @cached_property
    def _straight_rows_by_address(self) -> dict[int | None, int]:
        addresses = [] if self._straight is None else self._straight.wanted.runs.addresses.tolist()
        return {address: row for row, address in enumerate(addresses)}

    def overlapping(self) -> Iterator[tuple[str, str]]:
        """Names of targets that overlap in memory, of which the one that is filled last would win."""
        spans = [memory_range(filled.tensor) for filled in self._filled]
        starts = np.array([span.start for span in spans], dtype=np.uint64)
        stops = np.array([span.stop for span in spans], dtype=np.uint64)
        devices = [filled.tensor.device for filled in self._filled]
        if self._straight is not None:
            runs = self._straight.wanted.runs
            starts, stops = np.concatenate([runs.addresses, starts]), np.concatenate([runs.stops, stops])
            devices = [*map(runs.devices.__getitem__, runs.device_codes.tolist()), *devices]
        for group in meeting_groups(devices, starts, stops):
            filled = [self._filled_at(number) for number in group]
            for pair in shared_elements([each.tensor for each in filled]):
                one, other = (filled[place] for place in pair)
                # The same memory for the same boxes is a tie, whatever placements it has.
                if one.chunks != other.chunks or tie_key(one.tensor) != tie_key(other.tensor):
                    yield one.fqn, other.fqn

    def _filled_at(self, number: int) -> _Filled:
        """What has this number among the straight reads and then those that are filled one by one."""
        if number >= self._straight_count:
            return self._filled[number - self._straight_count]
        assert self._straight is not None
        leaf, memory = self._straight.wanted.leaves[number], self._straight.wanted.memory[number]
        return _Filled(leaf.fqn, memory, local_shards(leaf.value, key=leaf.fqn).chunks)

    def plan(self, values: Sequence[ReadItem]) -> LoadPlan:
        """Everything that was added, and these Python values; straight reads first, row by row."""
        plan = LoadPlan.build([*self._items, *values], self._shareable)
        self._plan = plan if self._straight is None else LoadPlan.joined(self._straight.as_plan(), plan)
        return self._plan

    def acquire(self, item: ReadItem) -> torch.Tensor:
        """The memory for one item."""
        memory = self._memory.get(item.dest_index)
        if memory is None:
            memory = self._straight_memory(self._straight_rows[item.dest_index.fqn])
        return view_of_box(memory, item.dest_offsets, item.lengths)

    def acquire_all(self, items: Sequence[ReadItem]) -> list[torch.Tensor]:
        """The memory for each of `items`."""
        if not (
            isinstance(items, PlannedItems)
            and self._plan is not None
            and items.plan.target_columns is self._plan.target_columns
        ):
            return [self.acquire(item) for item in items]
        boxes, targets = items.columns.boxes, items.plan.target_columns.boxes
        whole = boxes.volumes() == targets.volumes()[boxes.entry]
        straight = whole & (boxes.entry < self._straight_count)
        others = iter(items.take(np.flatnonzero(~straight)))
        return [
            self._straight_memory(row) if is_straight else self.acquire(next(others))
            for row, is_straight in zip(boxes.entry.tolist(), straight.tolist(), strict=True)
        ]

    @property
    def _straight_count(self) -> int:
        return 0 if self._straight is None else len(self._straight.wanted)

    @cached_property
    def _straight_rows(self) -> dict[str, int]:
        leaves = () if self._straight is None else self._straight.wanted.leaves
        return {leaf.fqn: row for row, leaf in enumerate(leaves)}

    def _straight_memory(self, row: int) -> torch.Tensor:
        assert self._straight is not None
        memory = self._straight.wanted.memory[row]
        return memory.detach() if memory.requires_grad else memory


def _read_item(index: MetadataIndex, dest: Box, storage_row: int, have: Box, part: Box) -> ReadItem:
    return ReadItem(
        index, storage_row, relative(part, dest).offsets, relative(part, have).offsets, part.sizes, EntryKind.TENSOR
    )
