"""A device that is not the CPU, without hardware: torch's PrivateUse1 as `npu`, with the few kernels that hpdcp needs.

Its memory lies at addresses that the processor may not touch, so code that takes a device tensor for a host one dies
instead of passing. Work is queued and done only when somebody waits for it, the latest moment that a real device
allows: whoever does not wait for an event sees old bytes. `install()` is for a process of its own, since torch keeps
what it registers for as long as the process lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hpdcp._devices import buffers

NAME: Final = "npu"
_PAGE: Final = mmap.PAGESIZE
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass
class _Block:
    """Device memory: out of reach at `address`, in reach for the kernels here through `bytes`."""

    address: int
    nbytes: int
    bytes: torch.Tensor
    storage: StorageWeakRef


class FakeDevice:
    """What the device did, and what it holds."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.log: list[str] = []
        """In order: `copy to host`, `copy to device`, `fill`, each when it is asked for, with the stream's name;
        `wait event`, `wait stream`, `wait device` when the host waits."""
        self.blocks: dict[int, _Block] = {}
        self.pinned: list[tuple[int, int]] = []
        """Page-locked host memory, from and to; kept for ever, so an address is never mistaken for another's."""
        self.pinned_bytes = 0
        self.peak = 0
        """Most bytes of device memory that were held at a time."""
        self.kept: list[torch.Tensor] = []

    def note(self, text: str) -> None:
        self.log.append(text)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        with self.lock:
            self.sweep()
            length = -(-max(nbytes, 1) // _PAGE) * _PAGE
            descriptor = os.memfd_create("fake-device")
            os.ftruncate(descriptor, length)
            shadow = mmap.mmap(descriptor, length)
            address = _libc.mmap(None, length, 0, mmap.MAP_SHARED, descriptor, 0)
            os.close(descriptor)
            # As real memory is: not zero, so that what was never filled shows.
            shadow[:] = b"\xa5" * length
            storage = torch._C._construct_storage_from_data_pointer(address, torch.device(NAME, 0), nbytes)
            data = torch.frombuffer(shadow, dtype=torch.uint8)
            self.blocks[address] = _Block(address, nbytes, data, StorageWeakRef(storage))
            self.peak = max(self.peak, self.held())
            return storage

    def sweep(self) -> None:
        for address, block in list(self.blocks.items()):
            if block.storage.expired():
                _libc.munmap(address, -(-max(block.nbytes, 1) // _PAGE) * _PAGE)
                del self.blocks[address]

    def held(self) -> int:
        """Bytes of device memory in use."""
        with self.lock:
            self.sweep()
            return sum(block.nbytes for block in self.blocks.values())

    def forget_peak(self) -> None:
        self.peak = self.held()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether all of it is page-locked."""
        if not tensor.numel():
            return True
        first = tensor.data_ptr()
        last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) * tensor.itemsize
        return any(start <= first and last < stop for start, stop in self.pinned)

    def pin(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory."""
        made = torch.full((max(nbytes, 1),), 0x5A, dtype=torch.uint8, device="cpu")[:nbytes]
        with self.lock:
            self.pinned.append((made.data_ptr(), made.data_ptr() + nbytes))
            self.pinned_bytes += nbytes
            self.kept.append(made)
        return made


STATE: Final = FakeDevice()


class Stream:
    """Work in order, done when somebody waits for it."""

    count = 0

    def __init__(self, device: Any = None, name: str | None = None) -> None:
        del device
        Stream.count += 1
        self.name = name or f"side {Stream.count}"
        self._queue: deque[Callable[[], None]] = deque()
        self.begun = self.ended = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        with STATE.lock:
            self._queue.append(work)
            self.begun += 1

    def run(self, until: int) -> None:
        with STATE.lock:
            while self.ended < until and self._queue:
                work = self._queue.popleft()
                self.ended += 1
                work()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.finish)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        STATE.note(f"wait stream {self.name}")
        self.run(self.begun)


class Event:
    """A place in a stream's order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or MODULE.current_stream()
        self._at = (stream, stream.begun)

    def finish(self) -> None:
        if self._at is not None:
            self._at[0].run(self._at[1])

    def query(self) -> bool:
        return self._at is None or self._at[0].ended >= self._at[1]

    def synchronize(self) -> None:
        STATE.note("wait event")
        self.finish()


class FakeModule:
    """`torch.npu`."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self.default = Stream(name="default")
        self.streams = [self.default]
        self._current = threading.local()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        del seed

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        del device

    def current_stream(self, device: Any = None) -> Stream:
        del device
        found: Stream = getattr(self._current, "stream", self.default)
        return found

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def synchronize(self, device: Any = None) -> None:
        del device
        STATE.note("wait device")
        raise AssertionError("hpdcp waits for events, never for the whole device")


MODULE: Final = FakeModule()
_CPU: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def shadow(tensor: torch.Tensor) -> torch.Tensor:
    """The device tensor's memory as a host tensor, as it is now, whatever is queued; a host tensor itself."""
    if tensor.device.type != NAME:
        return tensor
    base = STATE.blocks[tensor.untyped_storage().data_ptr()].bytes
    return base.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _place(storage: torch.UntypedStorage, dtype: torch.dtype, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    made = torch._C._acc.create_empty_tensor((0,), dtype)
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    placed: torch.Tensor = set_.redispatch(_CPU, made, storage, offset, list(size), list(stride))
    return placed


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    elements = 0 if 0 in tuple(size) else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return _place(STATE.allocate(elements * dtype.itemsize), dtype, size, stride)


def _empty(size: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
    stride = [math.prod(max(length, 1) for length in list(size)[axis + 1 :]) for axis in range(len(size))]
    return _empty_strided(size, stride, dtype)


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    stream = MODULE.current_stream()
    down = target.device.type != NAME
    up = source.device.type != NAME
    if up and not STATE.is_pinned(source):
        source = source.clone()  # as drivers do with memory that may go away
    kind = "to host" if down else "to device" if up else "within the device"
    how = "later" if non_blocking else "at once"
    host = target if down else source
    memory = (
        "" if not (up or down) else " pinned" if STATE.is_pinned(host) or (up and not non_blocking) else " pageable"
    )
    STATE.note(f"copy {kind}{memory} {how} on {stream.name}")
    into, out_of = target.detach(), source.detach()
    stream.enqueue(lambda: _discard(shadow(into).copy_(shadow(out_of))))
    if not non_blocking:
        stream.run(stream.begun)
    return target


def _fill_(target: torch.Tensor, value: Any) -> torch.Tensor:
    kept, number = target.detach(), value.item() if isinstance(value, torch.Tensor) else value
    STATE.note(f"fill on {MODULE.current_stream().name}")
    MODULE.current_stream().enqueue(lambda: _discard(shadow(kept).fill_(number)))
    return target


def _discard(_: object) -> None:
    return


def _zero_(target: torch.Tensor) -> torch.Tensor:
    return _fill_(target, 0)


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    stream = MODULE.current_stream()
    STATE.note(f"copy to host pinned at once on {stream.name}")
    stream.run(stream.begun)
    return shadow(tensor).item()


def _as_strided(tensor: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    at = tensor.storage_offset() if offset is None else offset
    found: torch.Tensor = torch.ops.aten.as_strided.default.redispatch(_CPU, tensor, list(size), list(stride), at)
    return found


def _view(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.view.default.redispatch(_CPU, tensor, list(size))
    return found


_libraries: list[torch.library.Library] = []


def install() -> FakeDevice:
    """Register the device with torch, for the rest of this process."""
    if not _libraries:
        _setup_privateuseone_for_python_backend(NAME, backend_module=MODULE)
        library = torch.library.Library("aten", "IMPL")
        kernels: Sequence[tuple[str, Callable[..., Any]]] = (
            ("empty.memory_format", _empty),
            ("empty_strided", _empty_strided),
            ("copy_", _copy_),
            ("fill_.Scalar", _fill_),
            ("fill_.Tensor", _fill_),
            ("zero_", _zero_),
            ("_local_scalar_dense", _local_scalar_dense),
            ("as_strided", _as_strided),
            ("view", _view),
        )
        for name, kernel in kernels:
            library.impl(name, kernel, "PrivateUse1")
        _libraries.append(library)
        buffers.allocate_pinned = STATE.pin
        torch.Tensor.is_pinned = lambda tensor, device=None: STATE.is_pinned(tensor)  # type: ignore[method-assign]
    return STATE
