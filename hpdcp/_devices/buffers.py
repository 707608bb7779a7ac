"""Flat memory to copy through: page-locked on the host, and on the device.

Copies between a device and page-locked memory go at the link's full speed and beside other work. Where torch cannot
page-lock memory, ordinary memory is used, and the log says so once.
"""

from __future__ import annotations

import logging

import torch

from hpdcp._base.timing import log_once
from hpdcp._devices.device import copy_into, current_device, empty_on_host


def allocate_pinned(nbytes: int) -> torch.Tensor:
    """Page-locked host memory, as flat bytes; RuntimeError where torch cannot lock any.

    torch keeps what is freed for the next call, since locking costs as much as a copy.
    """
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def pinned_if_possible(nbytes: int) -> tuple[torch.Tensor, bool]:
    """Flat bytes of host memory, and whether they are page-locked."""
    try:
        return allocate_pinned(nbytes), True
    except RuntimeError as error:
        log_once(
            logging.WARNING, f"torch cannot page-lock host memory here, so copies from and to devices block: {error}"
        )
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), False


def host_buffer(nbytes: int, *, for_device: bool) -> torch.Tensor:
    """Host memory as flat bytes, page-locked where what is in it goes to a device."""
    return pinned_if_possible(nbytes)[0] if for_device and nbytes else empty_on_host((nbytes,), torch.uint8)


def to_device(nbytes: int, host: torch.Tensor) -> torch.Tensor:
    """A `device_buffer` with what `host` holds, brought there in the order of what the caller asks of the device.

    torch keeps page-locked memory until the copy is done.
    """
    made = device_buffer(nbytes)
    copy_into(made, host, non_blocking=host.is_pinned())
    return made


def device_buffer(nbytes: int) -> torch.Tensor:
    """Memory of the device that this process computes on, as flat bytes."""
    return torch.empty(nbytes, dtype=torch.uint8, device=current_device())
