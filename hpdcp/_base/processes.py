"""Which process did something, as other processes and other hosts can tell, and whether it is known to have ended."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process among those of all hosts; pids alone are given out again."""

    host: str
    where: str
    """Boot and process namespace; empty where they are unknown."""
    pid: int
    started: str
    """When the process began, as the kernel says it; empty where there is none of that pid, or a zombie."""

    @classmethod
    def of(cls, pid: int) -> ProcessMark:
        """A process that can be seen from here."""
        where, started = "", ""
        with contextlib.suppress(OSError, IndexError):
            where = _where()
            # The 3rd and the 22nd field, counted behind the name, which may hold spaces.
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            started = "" if state in "ZX" else fields[18]
        return cls(socket.gethostname(), where, pid, started)

    @classmethod
    def current(cls) -> ProcessMark:
        """This process."""
        return _current(os.getpid())

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> ProcessMark:
        """What `to_json` gave; KeyError, TypeError or ValueError for what it cannot have given."""
        return cls(str(told["host"]), str(told["where"]), int(told["pid"]), str(told["started"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_this(self) -> bool:
        """Whether it is the process that asks."""
        return self == self.current()

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended; of another host, or of a container apart, that is never known."""
        now = self.of(self.pid)
        return bool(self.where) and self.where == now.where and self.started != now.started

    @property
    def token(self) -> str:
        """It in so few letters that they fit into a name, of digits, letters and `-`."""
        return f"{hashlib.blake2b(self.where.encode(), digest_size=4).hexdigest()}-{self.pid}-{self.started or 0}"


def has_ended(token: str) -> bool:
    """Whether the process of the token is known to have ended.

    >>> has_ended(ProcessMark.current().token), has_ended("of another host")
    (False, False)
    """
    where, _, rest = token.partition("-")
    pid, _, started = rest.partition("-")
    if not (pid.isascii() and pid.isdigit() and len(pid) < 10) or not started:
        return False
    now = ProcessMark.of(int(pid))
    return bool(now.where) and now.token.partition("-")[0] == where and started != (now.started or "0")


@functools.cache
def _current(pid: int) -> ProcessMark:
    return ProcessMark.of(pid)


@functools.cache
def _where() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
