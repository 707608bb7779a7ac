"""Where the elements of a tensor lie in memory.

The one place that turns a tensor into an address: torch itself, asked to copy, reads and writes beyond a storage that
was freed or shrunk below its tensor (`untyped_storage().resize_(0)`, as FSDP1 and offloading do), and so would whoever
takes `data_ptr()` for granted.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
from dataclasses import dataclass
from typing import Final

import torch

from hpdcp._base.errors import InvalidArgumentError

_MAPS: Final = "/proc/self/maps"


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """From a tensor's first byte to after its last one; what lies between its elements is inside."""

    start: int
    stop: int


def memory_range(tensor: torch.Tensor) -> MemoryRange:
    """Where a strided tensor with a storage of its own lies, on its device; an empty one lies nowhere, at (0, 0).

    Raises:
        InvalidArgumentError: it has elements that its storage does not, or none of them is in memory.
    """
    count = tensor.numel()
    if count == 0:
        return MemoryRange(0, 0)
    if not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    itemsize = tensor.element_size()
    needed = (tensor.storage_offset() + count) * itemsize
    try:
        present, address = tensor.untyped_storage().nbytes(), tensor.data_ptr()
    except RuntimeError as error:
        raise InvalidArgumentError(f"it has no memory of its own that can be told ({error}).") from error
    if present < needed:
        raise InvalidArgumentError(
            f"its storage has {present} bytes and the tensor needs {needed}: the memory was freed or shrunk below it, "
            "as FSDP and offloading do with untyped_storage().resize_(). Bring the values back first."
        )
    if not address:
        raise InvalidArgumentError("it has elements and no memory. Make a copy of it with clone() first.")
    return MemoryRange(address, address + count * itemsize)


_ALL_OF_IT: Final = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B").toreadonly()
"""Every address of this process. Cutting a view out of it takes 0.1 us, making one from a tensor 14."""


def memory_at(address: int, nbytes: int) -> memoryview:
    """`nbytes` bytes of the host at an address that `memory_range` gave, to be read.

    The view keeps nothing alive: whoever takes it holds the tensor for as long as anybody looks.
    """
    return _ALL_OF_IT[address : address + nbytes]


class ReadOnlyMemory:
    """What of this process's memory may not be written to, as the system has it now."""

    def __init__(self) -> None:
        self._starts: list[int] | None = None
        self._stops: list[int] = []

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor lies in such memory in part, as one over a map of a file that is open for reading does.

        Of an array of numpy that is only flagged as read-only nothing can be told: torch's tensor over it does not
        know, and its memory is like any other.
        """
        # Memory that torch allocated itself is never read-only, and can be resized.
        if tensor.device.type != "cpu" or tensor.untyped_storage().resizable():
            return False
        if self._starts is None:
            self._look()
            assert self._starts is not None
        span = memory_range(tensor)
        at = bisect.bisect_right(self._stops, span.start)
        return at < len(self._starts) and self._starts[at] < span.stop

    def _look(self) -> None:
        ranges: list[tuple[int, int]] = []
        try:
            with open(_MAPS) as lines:
                for line in lines:
                    where, access = line.split(maxsplit=2)[:2]
                    if "w" not in access:
                        start, stop = where.split("-")
                        ranges.append((int(start, 16), int(stop, 16)))
        except OSError:
            # Only Linux tells; elsewhere such a target ends the process, as writing to it anywhere does.
            ranges = []
        self._starts = [start for start, _ in ranges]
        self._stops = [stop for _, stop in ranges]
