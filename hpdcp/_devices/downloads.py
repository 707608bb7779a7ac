"""Tensors of devices, brought to the host one after another while the next ones are on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import torch

from hpdcp._base.splitting import cut_rows
from hpdcp._devices import streams
from hpdcp._devices.buffers import pinned_if_possible
from hpdcp._devices.device import SUB_BYTE_DTYPES, is_host
from hpdcp._devices.streams import CopyEvent, CopyStream

BATCH_BYTES: Final = 16 << 20
"""Of one batch of a download. Copies of this size run at the link's full speed (52 GB/s down, on one H200, in others'
measurements), and a write of them takes some milliseconds, in which the next one is copied."""
_ALIGNMENT: Final = 16
"""Of each tensor in a batch: the widest element's, complex128."""

_IN_USE: Final = 1 << 62
"""The `end` of memory that a batch is copied into now."""

_Key = TypeVar("_Key")


@dataclass(slots=True, eq=False)
class _Buffer:
    """Host memory for one batch."""

    memory: torch.Tensor
    pinned: bool
    end: int = 0
    """How many bytes had been handed out in all when the last of this memory was."""


@dataclass(slots=True)
class _Batch(Generic[_Key]):
    """What is copied together."""

    parts: list[tuple[_Key, torch.Tensor]] = field(default_factory=list)
    """On the device: flat bytes, or a tensor whose elements are not in a row. On the host: as it is."""
    nbytes: int = 0
    """Of the memory it is copied to."""


class Downloads(Generic[_Key]):
    """Brings tensors to the host through page-locked memory that is used again and again.

    While what was brought is used, the next `BATCH_BYTES` are on their way. The memory holds two batches and those that
    the user may still look at, which hold `window` bytes: a batch more than that, and twice that at worst, where
    tensors whose elements are not in a row do not fill batches. Tensors of the host pass through, and take none.

    Args:
        window: bytes handed out earlier that the user may still look at when it asks for more; None: all of them,
            which then get memory of their own.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._buffers: list[_Buffer] = []
        self._handed_out = 0

    def release(self) -> None:
        """The user is done with all that was handed out before."""
        for buffer in self._buffers:
            buffer.end = self._handed_out - (self._window or 0)

    def count(self, nbytes: int) -> None:
        """Count bytes that the user was handed by someone else meanwhile; they use up the window too."""
        self._handed_out += nbytes

    def on_host(self, items: Iterable[tuple[_Key, torch.Tensor]]) -> Iterator[tuple[_Key, torch.Tensor]]:
        """The items' elements in row-major order, each in one host tensor after another, in the items' order.

        What is asked of `items` early is one batch, and only where a device's tensors are among them.
        """
        batches = _batches(items)
        ahead: deque[tuple[_Batch[_Key], _Buffer | None, list[CopyEvent]]] = deque()
        try:
            for batch in batches:
                ahead.append(self._begin(batch))
                # Nothing is gained by asking for what comes after a host tensor before that is handed out.
                waiting = 1 if batch.nbytes else 0
                del batch  # whoever gives host tensors may use one's memory again once nobody holds it
                while len(ahead) > waiting:
                    yield from self._finish(*ahead[0])
                    ahead.popleft()
            while ahead:
                yield from self._finish(*ahead[0])
                ahead.popleft()
        finally:
            # Also when the user gives up: the memory must not be freed below a copy.
            for _, _, events in ahead:
                for event in events:
                    event.synchronize()

    def _begin(self, batch: _Batch[_Key]) -> tuple[_Batch[_Key], _Buffer | None, list[CopyEvent]]:
        if not batch.nbytes:
            return batch, None, []
        buffer = self._free_buffer(batch.nbytes)
        used: dict[torch.device, CopyStream] = {}
        for (_, part), into in zip(batch.parts, _targets(batch, buffer.memory), strict=True):
            if into is None:
                continue
            if part.device not in used:
                used[part.device] = streams.copy_stream(part.device)
                used[part.device].follow()
            used[part.device].copy(into.view(part.dtype).view(part.shape), part, non_blocking=buffer.pinned)
        return batch, buffer, [stream.record_event() for stream in used.values()]

    def _finish(
        self, batch: _Batch[_Key], buffer: _Buffer | None, events: list[CopyEvent]
    ) -> Iterator[tuple[_Key, torch.Tensor]]:
        for event in events:
            event.synchronize()
        targets = [None] * len(batch.parts) if buffer is None else _targets(batch, buffer.memory)
        for (key, part), into in zip(batch.parts, targets, strict=True):
            if into is None:
                yield key, part
            else:
                yield key, into.clone() if self._window is None else into
            self._handed_out += part.numel() * part.element_size()
            if buffer is not None:
                buffer.end = self._handed_out

    def _free_buffer(self, nbytes: int) -> _Buffer:
        # One that the batch before this one is in is not free: nothing was handed out after it.
        for buffer in self._buffers:
            if self._handed_out - buffer.end >= (self._window or 0) and len(buffer.memory) >= nbytes:
                self._buffers.remove(buffer)
                self._buffers.append(buffer)
                buffer.end = _IN_USE
                return buffer
        size = BATCH_BYTES if self._buffers or nbytes > BATCH_BYTES // 2 else nbytes
        buffer = _Buffer(*pinned_if_possible(size), end=_IN_USE)
        self._buffers.append(buffer)
        return buffer


def _batches(items: Iterable[tuple[_Key, torch.Tensor]]) -> Iterator[_Batch[_Key]]:
    """Batches of at most `BATCH_BYTES` on devices; a host tensor is one by itself unless it comes among device ones."""
    batch: _Batch[_Key] = _Batch()
    host_bytes_in_it = 0
    for key, tensor in items:
        if is_host(tensor):
            host_bytes_in_it += tensor.numel() * tensor.element_size()
            batch.parts.append((key, tensor))
            del tensor
            if not batch.nbytes or host_bytes_in_it >= BATCH_BYTES:
                yield batch
                batch, host_bytes_in_it = _Batch(), 0
            continue
        for part in _parts(tensor.detach()):
            position = 0
            length = part.numel() * part.element_size()
            while position < length:
                room = BATCH_BYTES - batch.nbytes
                flat = part.dtype is torch.uint8 and part.dim() == 1
                taken = min(length - position, room) if flat else length
                if taken > room or not taken:
                    yield batch
                    batch, host_bytes_in_it = _Batch(), 0
                    continue
                batch.parts.append((key, part[position : position + taken] if flat else part))
                batch.nbytes += -(-taken // _ALIGNMENT) * _ALIGNMENT
                position += taken
    if batch.parts:
        yield batch


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A device tensor as flat bytes where its elements are in a row, else in parts that fit a batch."""
    if not tensor.numel():
        return
    if tensor.dtype in SUB_BYTE_DTYPES:
        tensor = tensor.view(torch.uint8)
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        yield tensor.view(-1).view(torch.uint8)
        return
    if tensor.numel() * tensor.element_size() <= BATCH_BYTES:
        # One more dimension, so that it is never taken for flat bytes, which may be cut.
        yield tensor.unsqueeze(0)
        return
    axis, parts = cut_rows(tensor.shape, BATCH_BYTES // tensor.element_size())
    for start, length in parts:
        yield from _parts(tensor.narrow(axis, start, length))


def _targets(batch: _Batch[_Key], memory: torch.Tensor) -> list[torch.Tensor | None]:
    """Where each part goes, as flat bytes; None for what is on the host already."""
    found: list[torch.Tensor | None] = []
    start = 0
    for _, part in batch.parts:
        if is_host(part):
            found.append(None)
            continue
        length = part.numel() * part.element_size()
        found.append(memory[start : start + length])
        start += -(-length // _ALIGNMENT) * _ALIGNMENT
    return found
