"""A copy of what one rank saves, in shared memory, taken while the trainer waits.

The trainer's planner says what there is (`build_local_plan`) and where (`get_tensor`, `get_bytes`); the copy holds
the items themselves, so a view costs what it shows and no more, and nothing in it knows DTensors, devices or classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from hpdcp._background._arena import Arena, ArenaRange, tensor_at
from hpdcp._background.data_copier import DataCopier
from hpdcp._base.timing import timed
from hpdcp._devices import device
from hpdcp._devices.memory import memory_at
from hpdcp._devices.staging import DeviceCopies, copy_all
from hpdcp._format.columns import EntryKind
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import PerRank
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.save_plan import SavePlan

_COPIED_HERE: Final = 64 << 10
"""A tensor of so many bytes is copied sooner than another thread is told of it."""


@dataclass(frozen=True, slots=True)
class StagedState:
    """What was copied: the plan of it, and where each item of that plan lies."""

    plan: SavePlan
    ranges: Sequence[ArenaRange]
    """Item by item."""

    def to_bytes(self) -> bytes:
        """For the worker, which has the memory itself by its descriptors."""
        return pack_columns(
            {
                "plan": np.frombuffer(self.plan.to_bytes(), dtype=np.uint8),
                "segment": np.array([where.segment for where in self.ranges], dtype=np.int64),
                "offset": np.array([where.offset for where in self.ranges], dtype=np.int64),
                "length": np.array([where.length for where in self.ranges], dtype=np.int64),
            },
            {},
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> StagedState:
        columns, _ = unpack_columns(data, where="a staged state")
        rows = zip(*(columns[name].tolist() for name in ("segment", "offset", "length")), strict=True)
        return cls(SavePlan.from_bytes(columns["plan"].tobytes()), [ArenaRange(*row) for row in rows])


@timed("build_staged_state_dict")
def build_staged_state_dict(planner: SavePlanner, plan: SavePlan, arena: Arena) -> StagedState:
    """Copy every item of `plan` out of the planner's state into `arena`, whose earlier contents are given up.

    Raises:
        StorageError: there is no shared memory for it.
    """
    kinds = plan.entries.kinds[plan.chunks.entry]
    objects = {row: planner.get_bytes(plan.item(row)) for row in np.flatnonzero(kinds == EntryKind.OBJECT).tolist()}
    lengths = plan.nbytes.tolist()
    for row, data in objects.items():
        lengths[row] = len(data)
    ranges = arena.lay_out(lengths)
    addresses = planner.get_addresses(plan).tolist()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    on_devices: list[torch.Tensor] = []
    into: list[tuple[memoryview, bool]] = []
    for row, (where, address) in enumerate(zip(ranges, addresses, strict=True)):
        if row in objects:
            arena.memory(where)[:] = objects[row]
            continue
        if address and where.length <= _COPIED_HERE:
            arena.memory(where)[:] = memory_at(address, where.length)
            continue
        item = plan.item(row)
        source = planner.get_tensor(item).detach()
        if device.is_host(source):
            pairs.append((tensor_at(arena.memory(where), source.dtype, item.index.sizes), source))
        else:
            on_devices.append(source)
            into.append((arena.memory(where), arena.page_locked(where, source.device)))
    from_devices = DeviceCopies(into, on_devices)
    try:
        copy_all(pairs)
    finally:
        from_devices.finish()
    return StagedState(plan, ranges)


def with_copied_values(value: Any) -> Any:
    """The state with every Python value copied as `DataCopier` knows its type; tensors and what holds them as it is.

    Containers without anything to copy are not rebuilt.
    """
    kind = type(value)
    if kind is dict:
        items = {key: with_copied_values(item) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if kind in (list, tuple):
        listed = [with_copied_values(item) for item in value]
        return kind(listed) if any(new is not old for new, old in zip(listed, value, strict=True)) else value
    if isinstance(value, PerRank):
        inner = with_copied_values(value.value)
        if inner is value.value:
            return value
        return PerRank.all(inner) if value.every_rank else PerRank(inner)
    if isinstance(value, (torch.Tensor, Mapping, list, tuple)) or callable(getattr(value, "load_state_dict", None)):
        return value
    return DataCopier.copy(value)
