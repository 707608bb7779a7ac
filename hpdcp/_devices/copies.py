"""Copies between a device and page-locked host memory, beside the device's other work.

    Downloads   tensors of a device, one after another, in host memory; the next batch is on its way while one is used
    Bounce      host memory that is read into while what was read before is on its way to the device
    Lane        the stream of a device that both use, and the events that tell when a copy is done

Nobody here waits for a whole device: training may go on there. A device whose module in torch has no streams, or for
which torch cannot page-lock memory, is copied to and from all the same, one copy at a time; the log says so once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

from hpdcp._base.timing import log_message
from hpdcp._devices.device import (
    SUB_BYTE_DTYPES,
    copy_into,
    current_device,
    device_module,
    empty_on_host,
    host_bytes,
    is_host,
    synchronize,
)

BATCH_BYTES: Final = 16 << 20
"""Of one batch of a download. Copies of this size run at the link's full speed (52 GB/s down, on one H200, in others'
measurements), and a write of them takes some milliseconds, in which the next one lands."""
_ALIGNMENT: Final = 16
"""Of each tensor in a batch: the widest element's, complex128."""

_Key = TypeVar("_Key")


class Landing(Protocol):
    """Tells when copies have landed; events of every device have this method."""

    def synchronize(self) -> None:
        """Return when they have."""


def allocate_pinned(nbytes: int) -> torch.Tensor:
    """Page-locked host memory, as flat bytes; RuntimeError where torch cannot lock any.

    torch keeps what is freed for the next call, since locking costs as much as a copy.
    """
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class Lane:
    """A stream of one device, for copies beside what the device computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        module: Any = device_module(device)
        self._module = module if all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")) else None
        self._stream: Any = None
        if self._module is None:
            _say_once(f"torch.{device.type} has no streams: copies from and to it wait for one another.")
        else:
            self._stream = self._module.Stream(device=device)

    def follow(self) -> None:
        """Let copies that are asked for from now on come after what the caller has queued on the device."""
        if self._module is not None:
            self._stream.wait_stream(_callers_stream(self.device, self._module))

    def lead(self) -> None:
        """Let what the caller queues on the device from now on come after the copies asked for until now."""
        if self._module is not None:
            self._module.current_stream(self.device).wait_stream(self._stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy, after what was copied before; `non_blocking` only where the host's side is page-locked as it is."""
        if self._module is None:
            copy_into(target, source)
            return
        with self._module.stream(self._stream):
            copy_into(target, source, non_blocking=non_blocking)

    def mark(self) -> Landing:
        """All copies asked for until now."""
        if self._module is None:
            return _Everything(self.device)
        landing: Landing = self._stream.record_event()
        return landing


@dataclass(frozen=True, slots=True)
class _Everything:
    """What a device without streams has to wait for."""

    device: torch.device

    def synchronize(self) -> None:
        synchronize(self.device)


@functools.cache
def lane(device: torch.device) -> Lane:
    """The device's one lane: what a copy on it frees is free for the next one, in the caching allocator's eyes too."""
    return Lane(device)


_caller: Final[ContextVar[tuple[torch.device, Any] | None]] = ContextVar("hpdcp_caller", default=None)


@contextlib.contextmanager
def after_the_caller() -> Iterator[None]:
    """Copies within, also those of threads started in a copy of this context, follow what is queued here now.

    A stream is current in one thread only, so a thread that reads ahead could not know the caller's.
    """
    token = _caller.set(_current_stream())
    try:
        yield
    finally:
        _caller.reset(token)


def _current_stream() -> tuple[torch.device, Any] | None:
    """The caller's device and stream; None where no device is in use."""
    device = current_device()
    module: Any = None if device is None else device_module(device)
    return (device, module.current_stream()) if device is not None and hasattr(module, "current_stream") else None


def _callers_stream(device: torch.device, module: Any) -> Any:
    known = _caller.get()
    return known[1] if known is not None and known[0] == device else module.current_stream(device)


@dataclass(slots=True, eq=False)
class _Slot:
    """Host memory for one batch."""

    memory: torch.Tensor
    pinned: bool
    end: int = 0
    """How much had been handed out, of everything, when the last of it was."""


@dataclass(slots=True)
class _Batch(Generic[_Key]):
    """What is copied together."""

    parts: list[tuple[_Key, torch.Tensor]] = field(default_factory=list)
    """On the device: flat bytes, or a tensor whose elements are not in a row. On the host: as it is."""
    nbytes: int = 0
    """Of slot memory."""


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
        self._slots: list[_Slot] = []
        self._handed = 0

    def release(self) -> None:
        """Nothing handed out before is looked at any more."""
        for slot in self._slots:
            slot.end = self._handed - (self._window or 0)

    def count(self, nbytes: int) -> None:
        """Something else was handed out meanwhile."""
        self._handed += nbytes

    def on_host(self, items: Iterable[tuple[_Key, torch.Tensor]]) -> Iterator[tuple[_Key, torch.Tensor]]:
        """The items' elements in row-major order, each in one host tensor after another, in the items' order.

        What is asked of `items` early is one batch, and only where a device's tensors are among them.
        """
        batches = _batches(items)
        ahead: deque[tuple[_Batch[_Key], _Slot | None, list[Landing]]] = deque()
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
            for _, _, landings in ahead:
                for landing in landings:
                    landing.synchronize()

    def _begin(self, batch: _Batch[_Key]) -> tuple[_Batch[_Key], _Slot | None, list[Landing]]:
        if not batch.nbytes:
            return batch, None, []
        slot = self._free_slot(batch.nbytes)
        lanes: dict[torch.device, Lane] = {}
        for (_, part), into in zip(batch.parts, _places(batch, slot.memory), strict=True):
            if into is None:
                continue
            if part.device not in lanes:
                lanes[part.device] = lane(part.device)
                lanes[part.device].follow()
            lanes[part.device].copy(into.view(part.dtype).view(part.shape), part, non_blocking=slot.pinned)
        return batch, slot, [used.mark() for used in lanes.values()]

    def _finish(
        self, batch: _Batch[_Key], slot: _Slot | None, landings: list[Landing]
    ) -> Iterator[tuple[_Key, torch.Tensor]]:
        for landing in landings:
            landing.synchronize()
        places = [None] * len(batch.parts) if slot is None else _places(batch, slot.memory)
        for (key, part), into in zip(batch.parts, places, strict=True):
            if into is None:
                yield key, part
            else:
                yield key, into.clone() if self._window is None else into
            self._handed += part.numel() * part.element_size()
            if slot is not None:
                slot.end = self._handed

    def _free_slot(self, nbytes: int) -> _Slot:
        # One that the batch before this one is in is not free: nothing was handed out after it.
        for slot in self._slots:
            if self._handed - slot.end >= (self._window or 0) and len(slot.memory) >= nbytes:
                self._slots.remove(slot)
                self._slots.append(slot)
                slot.end = _IN_USE
                return slot
        size = BATCH_BYTES if self._slots or nbytes > BATCH_BYTES // 2 else nbytes
        slot = _Slot(*_host_memory(size), end=_IN_USE)
        self._slots.append(slot)
        return slot


_IN_USE: Final = 1 << 62


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
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= BATCH_BYTES:
        # One more dimension, so that it is never taken for flat bytes, which may be cut.
        yield tensor.unsqueeze(0)
        return
    axis = next(axis for axis, size in enumerate(tensor.shape) if size > 1)
    rows = max(1, BATCH_BYTES * tensor.shape[axis] // nbytes)
    for start in range(0, tensor.shape[axis], rows):
        yield from _parts(tensor.narrow(axis, start, min(rows, tensor.shape[axis] - start)))


def _places(batch: _Batch[_Key], memory: torch.Tensor) -> list[torch.Tensor | None]:
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


class Bounce:
    """Two pieces of page-locked memory that take turns: one is filled while the other's contents go to devices."""

    def __init__(self) -> None:
        self._slots: list[tuple[torch.Tensor, bool]] = [_NOTHING, _NOTHING]
        self._landings: list[list[Landing]] = [[], []]
        self._turn = 0
        self._used: dict[torch.device, Lane] = {}

    def take(self, nbytes: int) -> memoryview:
        """The memory whose turn it is, once what went through it before has landed."""
        self._turn = 1 - self._turn
        self._wait(self._turn)
        if len(self._slots[self._turn][0]) < nbytes:
            self._slots[self._turn] = _NOTHING
            self._slots[self._turn] = _host_memory(nbytes)
        return host_bytes(self._slots[self._turn][0])

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source`, which lies in the memory taken last, to a device; it has landed after `drain`, or later."""
        if target.device not in self._used:
            self._used[target.device] = lane(target.device)
        # A cast, or elements that are not in a row, go through memory of torch's own, which is not locked.
        plain = source.dtype == target.dtype and source.is_contiguous() and self._holds(source)
        self._used[target.device].copy(target, source, non_blocking=plain)

    def mark(self) -> None:
        """All that was in the memory taken last is on its way."""
        self._landings[self._turn] += [used.mark() for used in self._used.values()]
        self._used = {}

    def drain(self) -> None:
        """Return when all of it has landed."""
        self.mark()
        self._wait(0)
        self._wait(1)

    def _wait(self, turn: int) -> None:
        for landing in self._landings[turn]:
            landing.synchronize()
        self._landings[turn] = []

    def _holds(self, source: torch.Tensor) -> bool:
        memory, pinned = self._slots[self._turn]
        return pinned and memory.data_ptr() <= source.data_ptr() < memory.data_ptr() + len(memory)


_NOTHING: Final = (torch.empty(0, dtype=torch.uint8, device="cpu"), False)


def host_buffer(nbytes: int, *, for_device: bool) -> torch.Tensor:
    """Host memory as flat bytes, page-locked where what is in it goes to a device."""
    return _host_memory(nbytes)[0] if for_device and nbytes else empty_on_host((nbytes,), torch.uint8)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the host tensor's memory is page-locked."""
    return tensor.is_pinned()


def to_device(nbytes: int, host: torch.Tensor) -> torch.Tensor:
    """A `device_buffer` with what `host` holds, brought there in the order of what the caller asks of the device.

    torch keeps page-locked memory until the copy is done.
    """
    made = device_buffer(nbytes)
    copy_into(made, host, non_blocking=is_pinned(host))
    return made


def device_buffer(nbytes: int) -> torch.Tensor:
    """Memory of the device that this process computes on, as flat bytes."""
    return torch.empty(nbytes, dtype=torch.uint8, device=current_device())


def settle() -> None:
    """Return when what the caller has queued on its device is done."""
    current = _current_stream()
    if current is not None:
        current[1].record_event().synchronize()


def follow_all(devices: Iterable[torch.device]) -> None:
    """Let each of these devices' lanes follow what the caller has queued there."""
    for device in devices:
        lane(device).follow()


def _host_memory(nbytes: int) -> tuple[torch.Tensor, bool]:
    """Memory, and whether it is page-locked."""
    try:
        return allocate_pinned(nbytes), True
    except RuntimeError as error:
        _say_once(f"torch cannot page-lock host memory here, so copies from and to devices block: {error}")
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), False


@functools.cache
def _say_once(text: str) -> None:
    log_message(logging.WARNING, text)
