"""The two contracts that decide what is saved and what is loaded.

A planner decides *what*; it never meets a file. A storage writer or reader executes the plan and never meets the
state dict: it asks the planner for each item's memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpdcp._devices.samples import span_checksums
from hpdcp._format.columns import I64
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import LoadPlan, ReadItem
from hpdcp._plan.read_targets import BatchTargets
from hpdcp._plan.samples import sample_spans
from hpdcp._plan.save_plan import SavePlan, WriteItem


@dataclass(frozen=True, slots=True)
class PlannerContext:
    """Where this rank stands among those that save or load together."""

    rank: int
    world_size: int
    is_coordinator: bool
    collective: bool
    """Whether the ranks' plans are made into one; False: each rank saves or loads for itself."""
    allow_pickle: bool = False
    """Whether a load may unpickle objects, which can run code from the checkpoint."""


class SavePlanner(ABC):
    """Decides what each rank stores. One save calls, in this order:

    1. `configure_planner`  every rank
    2. `build_local_plan`   every rank; raises before anything is written where the state cannot be stored
    3. `build_global_plan`  the coordinator, once, over all ranks' local plans (skipped on the other ranks; without
                            collectives every rank calls it on its own plan alone)
    4. `finalize_plan`      every rank, with its part of the global plan
    5. `waves`, and in each `get_addresses`, `expect`, then `get_parts` / `get_tensor` / `get_bytes`  every rank, once
                            or more for each item of its final plan, for what it compares with other ranks and for
                            what it sends them, from one thread; a box may be inside one that this rank planned.
                            `get_checksums` once at most, after all that
    6. `finish_write`       every rank

    Where `cache_key` says on every rank that an earlier plan is right for this state, 2 and 3 are skipped, and
    `finalize_plan` is given the earlier part, with -1 as the length of every object in it.

    An exception in any step on any rank makes every rank raise, and nothing is published.
    """

    @abstractmethod
    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        """Take the state to save. A planner may be used for many saves; this starts a new one."""

    def cache_key(self) -> Hashable | None:
        """Equal for two saves exactly when one's plan is right for the other, on this rank; None: never reuse a plan.

        Asked after `configure_planner`, before anything is planned. It must cover everything that `build_local_plan`
        and `build_global_plan` depend on, the planner's class and options included, and not the lengths of objects.
        Values of immutable plain types only, since a key may travel to another process.
        """
        return None

    @abstractmethod
    def build_local_plan(self) -> SavePlan:
        """Everything this rank holds, as if it were to write all of it."""

    @abstractmethod
    def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what, rank by rank, and the metadata of it all (storage still empty)."""

    @abstractmethod
    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        """Take this rank's part; the returned plan is what is written, the length of every item filled in."""

    def waves(self, plan: SavePlan) -> Iterable[I64]:
        """Rows of `plan`, which is what is written or compared next, in groups that are asked for one after another.

        A planner that has not all of the state in memory at a time brings each group when it is asked for it; the
        items of one are asked for no more when the next has been. All at once, unless overridden.
        """
        return [np.arange(len(plan), dtype=np.int64)]

    def left_out(self) -> SavePlan | None:
        """Asked after `build_local_plan`: what it left out of what this rank holds, of the same names.

        Other ranks are expected to have planned it; where none has, the save fails, and nothing is published.
        """
        return None

    def finish_write(self) -> None:
        """Nothing of the state is asked for any more; every rank, before the commit."""
        return

    def expect(self, items: Sequence[WriteItem]) -> None:
        """These will be asked for next, in this order, unless something fails. A layout that knows its order says so.

        A planner that fetches its state from somewhere can then fetch ahead.
        """
        return

    def get_addresses(self, plan: SavePlan) -> I64:
        """For each item of `plan`, the address on the host where it lies, row-major and in one piece; 0: ask for it.

        What lies there stays as it is until the next wave, or `finish_write`, and is read without another call: a
        layout may ask `get_parts` and `get_bytes` only for items that have a 0 here, as all have unless this is
        overridden. It is for states of so many tensors that a call for each would be what takes time.
        """
        return np.zeros(len(plan), dtype=np.int64)

    @abstractmethod
    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        """The memory of a TENSOR item, shaped `item.index.sizes`: any device, any strides; never a copy of a whole."""

    def get_parts(self, item: WriteItem) -> Iterable[torch.Tensor]:
        """The elements of a TENSOR item in row-major order, in one tensor after another, of any shapes.

        The whole as `get_tensor` gives it, unless overridden. A planner that has not all of a tensor in memory at a
        time brings each part when it is asked for it, and may do as it likes with one that nobody holds any more.
        """
        return (self.get_tensor(item),)

    def get_checksums(self, plan: SavePlan) -> list[tuple[int, ...]]:
        """For each item of `plan`, all TENSORs, the crc32c of each of its `sample_spans`; other ranks' must be equal.

        Out of `get_tensor`, unless overridden. Asked for boxes of the local plan, once all is written and outside of
        the waves. A planner that has not all of the state in memory at a time takes them where the state is.
        """
        return span_checksums((self.get_tensor(item), sample_spans(item.index, item.nbytes)) for item in plan.items)

    @abstractmethod
    def get_bytes(self, item: WriteItem) -> bytes:
        """The encoding of an OBJECT item, `item.nbytes` long."""


class LoadPlanner(BatchTargets):
    """Decides what each rank reads and where it goes. One load calls, in this order:

    1. `configure_planner`  every rank, with the checkpoint's metadata
    2. `build_local_plan`   every rank; raises before any target is changed where wanted and stored do not fit
    3. `build_global_plan`  the coordinator, once, over all ranks' local plans (without collectives: on its own)
    4. `finalize_plan`      every rank, with its part
    5. `apply_bytes`        every rank, for each OBJECT item
    6. `acquire_tensors`, then `apply_tensors`  every rank, for the TENSOR items, or for boxes of chunks that are
                            broadcast (items without a `storage_row`); from two threads, but never at the same time.
                            They ask `acquire_tensor` and `apply_tensor`, item by item, unless overridden
    7. `finish_load`        every rank, once all ranks have read everything

    An exception in any step on any rank makes every rank raise. Where the checkpoint turns out to have been replaced
    before anything was read (5), the load starts again from 1, once.
    """

    @abstractmethod
    def configure_planner(self, state_dict: Mapping[Any, Any], metadata: Metadata, context: PlannerContext) -> None:
        """Take the targets and what the checkpoint holds."""

    @abstractmethod
    def build_local_plan(self) -> LoadPlan:
        """What this rank needs, each item from one stored chunk."""

    @property
    def complete(self) -> bool:
        """After `build_local_plan`: whether the plan fills all that is wanted.

        Where ranks saved each for itself and this rank's record is not enough, the load starts again from 1 with the
        records of all.
        """
        return True

    @abstractmethod
    def build_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        """Every rank's part, in order of rank."""

    @abstractmethod
    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        """Take this rank's part; the returned plan is what is read."""

    @abstractmethod
    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        """The target's own memory for this item, shaped `item.lengths`: any device, strides or dtype."""

    @abstractmethod
    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """`tensor`, as `acquire_tensor` gave it, now holds the stored values."""

    @abstractmethod
    def apply_bytes(self, item: ReadItem, data: bytes) -> None:
        """The encoding of an object; decode and keep it, put it into the state dict in `finish_load`."""

    @abstractmethod
    def finish_load(self) -> None:
        """Put Python values back into the state dict and call `load_state_dict` where the state has one."""
