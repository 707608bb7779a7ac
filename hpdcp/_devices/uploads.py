"""Host memory that is read into while what was read before is on its way to a device."""

from __future__ import annotations

from typing import Final

import torch

from hpdcp._devices import streams
from hpdcp._devices.buffers import pinned_if_possible
from hpdcp._devices.device import host_bytes
from hpdcp._devices.streams import CopyEvent, CopyStream


class BounceBuffers:
    """Two pieces of page-locked memory that take turns: one is filled while the other's contents go to devices."""

    def __init__(self) -> None:
        self._memory: list[tuple[torch.Tensor, bool]] = [_NOTHING, _NOTHING]
        self._copies: list[list[CopyEvent]] = [[], []]
        self._turn = 0
        self._used: dict[torch.device, CopyStream] = {}

    def take(self, nbytes: int) -> memoryview:
        """The memory whose turn it is, once the copies of what it held before are done."""
        self._turn = 1 - self._turn
        self._wait(self._turn)
        if len(self._memory[self._turn][0]) < nbytes:
            self._memory[self._turn] = _NOTHING
            self._memory[self._turn] = pinned_if_possible(nbytes)
        return host_bytes(self._memory[self._turn][0])

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source`, which lies in the memory taken last, to a device; done when `drain` returns."""
        if target.device not in self._used:
            self._used[target.device] = streams.copy_stream(target.device)
        # A cast, or elements that are not in a row, go through memory of torch's own, which is not locked.
        plain = source.dtype == target.dtype and source.is_contiguous() and self._holds(source)
        self._used[target.device].copy(target, source, non_blocking=plain)

    def mark(self) -> None:
        """Nothing more is copied out of the memory taken last."""
        self._copies[self._turn] += [used.record_event() for used in self._used.values()]
        self._used = {}

    def drain(self) -> None:
        """Return when all copies are done."""
        self.mark()
        self._wait(0)
        self._wait(1)

    def _wait(self, turn: int) -> None:
        for event in self._copies[turn]:
            event.synchronize()
        self._copies[turn] = []

    def _holds(self, source: torch.Tensor) -> bool:
        memory, pinned = self._memory[self._turn]
        return pinned and memory.data_ptr() <= source.data_ptr() < memory.data_ptr() + len(memory)


_NOTHING: Final = (torch.empty(0, dtype=torch.uint8, device="cpu"), False)
