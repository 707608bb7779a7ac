"""The worker's planner: answers for the trainer's planner out of the staged copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hpdcp._background._arena import Segment, tensor_at
from hpdcp._background._sampled import Sampled
from hpdcp._background._staging import StagedState
from hpdcp._background._what_to_stage import tied_names_of
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._base.splitting import batches
from hpdcp._format.columns import I64, ChunkTable, EntryKind
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan.local_columns import LocalBoxes
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.save_plan import SavePlan, WriteItem
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.geometry import Box, intersect, relative
from hpdcp._state.views import view_of_box

Fetch = Callable[[SavePlan], tuple[StagedState, Sequence[Segment]]]
"""Has the trainer stage these items; where they are afterwards."""


class StagedPlanner(SavePlanner):
    """Plans and gives out a staged state, on behalf of the planner that the trainer has.

    Args:
        plan: what the trainer holds, or of that what earlier plans have it write and compare.
        global_planner: makes the global plan, as the trainer's planner would.
        key: stands for the trainer's planner's `cache_key`.
        rest: what this rank holds beside that, of the same names, where earlier plans have others write it.
        sampled: what is compared of `rest`.
        sample: has the trainer take samples of what is asked for; None where all of it was staged at once.
        fetch: brings what is asked for in waves, of at most `wave_bytes`; None where all of it was staged at once.
        released: called when nothing more is asked for.
    """

    def __init__(
        self,
        plan: SavePlan,
        global_planner: SavePlanner,
        key: Hashable | None,
        *,
        rest: SavePlan | None = None,
        sampled: Sampled | None = None,
        sample: Callable[[SavePlan], Sampled] | None = None,
        fetch: Fetch | None = None,
        wave_bytes: int = 0,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._global_planner = global_planner
        self._key = key
        self._rest = rest
        self.replanned = False
        """Whether the earlier plans that it was staged by turned out to be good on this rank only."""
        self._sampled = {} if sampled is None else sampled.by_index()
        self._sample = sample
        self._fetch = fetch
        self._wave_bytes = wave_bytes
        self._released = released
        names = zip(plan.entries.fqns, plan.entries.owners.tolist(), strict=True)
        self._entry = {name: row for row, name in enumerate(names)}
        self._tied = tied_names_of(plan)
        self._lengths = {plan.item(row).index: int(plan.nbytes[row]) for row in _object_rows(plan)}
        self._held: tuple[StagedState, Sequence[Segment]] | None = None
        self._by_index: dict[MetadataIndex, memoryview] | None = None
        self._boxes: dict[tuple[str, int | None], list[MetadataIndex]] = {}

    def hold(self, staged: StagedState, segments: Sequence[Segment]) -> None:
        """Give out these items from now on, and no others."""
        self._held = staged, segments
        self._by_index = None
        self._boxes = {}
        self._lengths |= {staged.plan.item(row).index: staged.ranges[row].length for row in _object_rows(staged.plan)}

    @property
    def _memory(self) -> dict[MetadataIndex, memoryview]:
        """Where each item lies that is held, once somebody asks for one."""
        if self._by_index is None:
            self._by_index = {}
            if self._held is not None:
                staged, segments = self._held
                ranges = zip(staged.plan.items, staged.ranges, strict=True)
                self._by_index = {item.index: segments[where.segment].memory(where) for item, where in ranges}
            for index in self._by_index:
                self._boxes.setdefault((index.fqn, index.owner), []).append(index)
        return self._by_index

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        self._global_planner.configure_planner({}, context)

    def cache_key(self) -> Hashable | None:
        return self._key

    def build_local_plan(self) -> SavePlan:
        if self._rest is not None:
            # Another rank has no such plan any more.
            self._key = None
            self.replanned = True
        return self._plan

    def left_out(self) -> SavePlan | None:
        return self._rest

    def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self._global_planner.build_global_plan(plans)

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        nbytes = plan.nbytes.copy()
        for row in np.flatnonzero(nbytes < 0).tolist():
            nbytes[row] = self._lengths[plan.item(row).index]
        return plan.with_nbytes(nbytes)

    def waves(self, plan: SavePlan) -> Iterable[I64]:
        if self._fetch is None:
            yield from super().waves(plan)
            return
        lengths: list[int] = plan.nbytes.tolist()
        for batch in batches(range(len(lengths)), lengths.__getitem__, self._wave_bytes):
            rows = np.array(batch, dtype=np.int64)
            # What was there is given up first, so that the trainer may use its memory again.
            self._held, self._by_index = None, None
            self.hold(*self._fetch(plan.select(rows)))
            yield rows

    def finish_write(self) -> None:
        self._released()

    def get_addresses(self, plan: SavePlan) -> I64:
        if self._held is None:
            return super().get_addresses(plan)
        staged, segments = self._held
        first = [segment.address for segment in segments]
        at = np.array([first[where.segment] + where.offset for where in staged.ranges], dtype=np.int64)
        at[_object_rows(staged.plan)] = 0
        boxes = LocalBoxes(self._of_this_rank(staged.plan), staged.plan.nbytes, at)
        return boxes.addresses_of(self._of_this_rank(plan), plan.nbytes)

    def _of_this_rank(self, plan: SavePlan) -> ChunkTable:
        """The boxes of `plan`, with the rows of the names that the trainer has."""
        names = zip(plan.fqns, plan.entries.owners.tolist(), strict=True)
        rows = np.array([self._entry.get(name, len(self._entry)) for name in names], dtype=np.int64)
        return plan.chunks.with_entry(rows[plan.chunks.entry])

    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        index = item.index
        if index.owner is None and index.fqn in self._tied:
            index = replace(index, fqn=self._tied[index.fqn])
        owner = -1 if index.owner is None else index.owner
        dtype = dtype_of(self._plan.entries.dtype(self._entry[index.fqn, owner]))
        memory = self._memory.get(index)
        if memory is not None:
            return tensor_at(memory, dtype, index.sizes)
        wanted = Box(index.offsets, index.sizes)
        for held in self._boxes.get((index.fqn, index.owner), ()):
            box = Box(held.offsets, held.sizes)
            if intersect(wanted, box) == wanted:
                part = tensor_at(self._memory[held], dtype, held.sizes)
                return view_of_box(part, relative(wanted, box).offsets, wanted.sizes)
        raise InvalidArgumentError(f"the plan has an item that was not staged: {index}.")

    def get_checksums(self, plan: SavePlan) -> list[tuple[int, ...]]:
        if self._sample is not None:
            return list(self._sample(plan).checksums) if len(plan) else []
        known = [self._sampled.get(item.index) for item in plan.items]
        staged = iter(super().get_checksums(plan.select(np.flatnonzero([crcs is None for crcs in known]))))
        return [next(staged) if crcs is None else crcs for crcs in known]

    def get_bytes(self, item: WriteItem) -> bytes:
        return bytes(self._memory[item.index])


def _object_rows(plan: SavePlan) -> list[int]:
    rows: list[int] = np.flatnonzero(plan.entries.kinds[plan.chunks.entry] == EntryKind.OBJECT).tolist()
    return rows
