"""Which broadcasts carry the shared boxes, and in which order: the same on all members of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hpdcp._plan.shared_boxes import Group, SharedBox
from hpdcp._state.dtypes import dtype_of

STATUS_BYTES: Final = 64 << 20
"""After so many bytes of single boxes their reader rank says whether all is well; a batch says so itself."""

_TYPED: Final = frozenset({"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"})
"""Dtypes that every process group sends as they are; others travel as bytes (gloo 2.13 refuses int16, uint16 to
uint64 and float8, tried)."""


def transport_dtype(stored: str) -> str:
    """Name of the dtype in which elements of dtype `stored` are sent."""
    return stored if stored in _TYPED else "uint8"


@dataclass(slots=True)
class Unit:
    """What one broadcast carries: one box, a batch of small ones, or only whether its reader rank has failed."""

    group: Group
    reader_rank: int
    transport: str
    stored: str = "uint8"
    boxes: list[SharedBox] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Elements of each box."""
    nbytes: int = 0
    batch: bool = False
    on_device: bool = False
    """Whether it goes from device to device."""

    @property
    def is_status(self) -> bool:
        """Whether it says only if its reader rank has failed."""
        return not self.boxes

    def add(self, box: SharedBox, count: int, nbytes: int) -> None:
        """One box more in the batch."""
        self.boxes.append(box)
        self.counts.append(count)
        self.nbytes += nbytes


def units_of(boxes: Sequence[SharedBox], batch_bytes: int) -> list[Unit]:
    """The broadcasts that carry `boxes`, in the order of the walk: that of each one's first box.

    A box below `batch_bytes` joins the open batch of its group, reader rank and dtype, unless that would grow beyond
    `batch_bytes`; then a new batch is opened at this point of the order. All members of a group see the same boxes in
    the same order, so all of them form the same batches.
    """
    units: list[Unit] = []
    batches: dict[tuple[Group, int, str, bool], Unit] = {}
    unconfirmed: dict[tuple[Group, int, bool], int] = {}
    for box in boxes:
        info, stored = box.info, box.stored_dtype
        count = math.prod(box.sizes)
        nbytes = count * dtype_of(stored).itemsize
        if nbytes < batch_bytes:
            key = (info.group, info.reader_rank, stored, info.on_device)
            batch = batches.get(key)
            if batch is None or batch.nbytes + nbytes > batch_bytes:
                batch = Unit(info.group, info.reader_rank, info.transport_dtype, stored, batch=True)
                batch.on_device = info.on_device
                batches[key] = batch
                units.append(batch)
            batch.add(box, count, nbytes)
            continue
        single = Unit(info.group, info.reader_rank, info.transport_dtype, stored, [box], [count], nbytes)
        single.on_device = info.on_device
        units.append(single)
        wire = (info.group, info.reader_rank, info.on_device)
        unconfirmed[wire] = unconfirmed.get(wire, 0) + nbytes
        if unconfirmed[wire] >= STATUS_BYTES:
            unconfirmed[wire] = 0
            units.append(Unit(info.group, info.reader_rank, "uint8", on_device=info.on_device))
    return units
