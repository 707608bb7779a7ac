"""Streams of a device for copies beside what it computes, and the order of copies and computation.

A device whose module in torch has no streams is copied to and from all the same, one copy at a time; the log says so
once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from hpdcp._base.timing import log_once
from hpdcp._devices.device import copy_into, current_device, device_module, synchronize


class CopyEvent(Protocol):
    """Tells when copies are done; events of every device have this method."""

    def synchronize(self) -> None:
        """Return when they are."""


class CopyStream:
    """A stream of one device, for copies beside what the device computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        module: Any = device_module(device)
        self._module = module if all(hasattr(module, name) for name in ("Stream", "stream", "current_stream")) else None
        self._stream: Any = None
        if self._module is None:
            log_once(
                logging.WARNING, f"torch.{device.type} has no streams: copies from and to it wait for one another."
            )
        else:
            self._stream = self._module.Stream(device=device)

    def follow(self) -> None:
        """Let copies that are asked for from now on come after what the caller has queued on the device."""
        if self._module is not None:
            self._stream.wait_stream(_callers_stream(self.device, self._module))

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy, after what was copied before; `non_blocking` only where the host's side is page-locked as it is."""
        if self._module is None:
            copy_into(target, source)
            return
        with self._module.stream(self._stream):
            copy_into(target, source, non_blocking=non_blocking)

    def record_event(self) -> CopyEvent:
        """An event that waits for all copies asked for until now."""
        if self._module is None:
            return _WholeDevice(self.device)
        event: CopyEvent = self._stream.record_event()
        return event


@dataclass(frozen=True, slots=True)
class _WholeDevice:
    """What a device without streams has to wait for."""

    device: torch.device

    def synchronize(self) -> None:
        synchronize(self.device)


@functools.cache
def copy_stream(device: torch.device) -> CopyStream:
    """The device's one stream for copies: the caching allocator gives what one copy frees to the next at once."""
    return CopyStream(device)


def follow_all(devices: Iterable[torch.device]) -> None:
    """Let copies from and to these devices come after what the caller has queued there."""
    for device in devices:
        copy_stream(device).follow()


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


def wait_for_caller() -> None:
    """Return when what the caller has queued on its device is done."""
    current = _current_stream()
    if current is not None:
        current[1].record_event().synchronize()
