"""What this rank's device, host and process groups are, as broadcasts need to know it."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from typing import Final

import torch.distributed as dist

from hpdcp._comm.process_group import backends_of
from hpdcp._devices import device

CPU: Final = "cpu"

_OVER_HOSTS: Final = frozenset({"gloo", "mpi"})
"""They send a device's tensors through memory of their own on the host, which hpdcp does better."""


def carried_kinds(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Kinds of devices whose tensors the group carries."""
    return tuple(kind for kind, name in backends_of(group).items() if kind == CPU or name not in _OVER_HOSTS)


def device_kind() -> str:
    """Of this rank's device; empty where there is none."""
    found = device.current_device()
    return "" if found is None else found.type


def device_backend() -> str:
    """What carries tensors of this rank's device among all ranks; empty where nothing does."""
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is None or device_kind() not in carried_kinds(default):
        return ""
    return backends_of(default)[device_kind()]


@functools.cache
def host_id() -> str:
    """Equal for processes that share a page cache: one kernel's boot, or where that is not told, one host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
