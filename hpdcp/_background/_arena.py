"""Shared memory that is touched once and then used by save after save.

The first write to a fresh page costs a fault, which limits a copy to 0.4-1.3 GB/s where touched memory takes 5-6
(measured); so the memory stays. It is a few large memfd segments, handed to the worker as descriptors: they count
against no `/dev/shm` limit (64 MB in a default container, where going over it ends the process with SIGBUS), and they
vanish with the last process that holds them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hpdcp._base.errors import StorageError
from hpdcp._devices import device
from hpdcp._devices.staging import lock_pages

_ALIGNMENT: Final = 64
_GRANULE: Final = 2 << 20
"""Segments are a multiple of this long."""


@dataclass(frozen=True, slots=True)
class ArenaRange:
    """Bytes of the arena."""

    segment: int
    offset: int
    length: int


class Segment:
    """One piece of shared memory, as this process sees it."""

    def __init__(self, descriptor: int, size: int, *, writable: bool) -> None:
        self.descriptor = descriptor
        self.size = size
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(descriptor, size, access=access)
        self._unlock: Callable[[], object] | None = None
        self._tried: set[str] = set()

    def page_locked(self, kind: torch.device) -> bool:
        """Whether this kind of device copies straight into it; page-locked when first asked, all of it.

        That takes all of its memory at once, which is what the state takes: only segments added for a state that has
        grown are larger.
        """
        if self._unlock is None and kind.type not in self._tried:
            self._tried.add(kind.type)
            self._unlock = lock_pages(memoryview(self._map), kind)
        return self._unlock is not None

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new one; StorageError when the system has no memory for it."""
        descriptor = os.memfd_create("hpdcp-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            return cls(descriptor, size, writable=True)
        except OSError as error:
            os.close(descriptor)
            raise StorageError(
                f"no shared memory for staging {size} bytes: {error}. Lower async_staging_budget."
            ) from error

    @property
    def address(self) -> int:
        """Of its first byte in this process; good for as long as the segment, or a view of it, is held."""
        return int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)

    def memory(self, where: ArenaRange) -> memoryview:
        """The bytes at `where`, without a copy."""
        return memoryview(self._map)[where.offset : where.offset + where.length]

    def close(self) -> None:
        """Close this process's descriptor; views that are still in use keep the memory."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        os.close(self.descriptor)


class Arena:
    """The trainer's side: memory that grows to what one save needs, and stays."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def lay_out(self, lengths: Sequence[int]) -> list[ArenaRange]:
        """A range for each length; whatever was laid out before is given up. Grows where there is too little room.

        Raises:
            StorageError: the system has no memory for it.
        """
        rest = sum(_aligned(length) for length in lengths)
        ranges: list[ArenaRange] = []
        segment = start = 0
        for length in lengths:
            while segment < len(self.segments) and start + length > self.segments[segment].size:
                segment, start = segment + 1, 0
            if segment == len(self.segments):
                # At least as much again, of which only what is written to takes memory: a value that grows from save
                # to save outgrows few segments.
                size = max(rest, _GRANULE, self.capacity)
                self.segments.append(Segment.create(-(-size // _GRANULE) * _GRANULE))
            ranges.append(ArenaRange(segment, start, length))
            start += _aligned(length)
            rest -= _aligned(length)
        return ranges

    def memory(self, where: ArenaRange) -> memoryview:
        """The writable bytes at `where`."""
        return self.segments[where.segment].memory(where)

    def page_locked(self, where: ArenaRange, kind: torch.device) -> bool:
        """Whether this kind of device copies straight into the memory at `where`."""
        return self.segments[where.segment].page_locked(kind)

    @property
    def capacity(self) -> int:
        """Bytes it holds, used or not."""
        return sum(segment.size for segment in self.segments)

    def close(self) -> None:
        """Give the memory back to the system, once no view of it is in use any more."""
        for segment in self.segments:
            segment.close()
        self.segments = []


def tensor_at(memory: memoryview, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """The memory as a tensor; writing to it writes to the memory where that is writable."""
    if not len(memory):
        return torch.empty(tuple(sizes), dtype=dtype, device="cpu")
    return device.tensor_over(memory).view(dtype).view(tuple(sizes))


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
