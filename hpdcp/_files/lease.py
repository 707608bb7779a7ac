"""The lease of a folder, `.attempt`: who last began to save there, and which attempts it found.

No attempt waits for a lease. The newest one has it, and an older one that sees so publishes nothing. A rank that saves
for itself has one of its own, `{rank}.attempt`, for as long as it saves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hpdcp._base.backend import Backend, checked_key
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._base.processes import ProcessMark
from hpdcp._files.publish import read_or_none
from hpdcp._format.file_names import LEASE, METADATA

SILENT_SECONDS: Final = 24 * 3600
"""How long a superseded attempt must have written nothing before its files are removed: its process may still live."""

running: Final[set[str]] = set()
"""Attempts of this process that may still publish."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An attempt that has leased a folder, and who can tell whether it will ever commit."""

    attempt: str
    began: float
    """Seconds since the epoch, by the clock of the rank that publishes; 0 where it is not known."""
    process: ProcessMark | None = None
    """Which would publish it; None in leases of earlier versions."""

    @classmethod
    def beginning(cls, attempt: str, now: float) -> Holder:
        """An attempt of this process."""
        running.add(attempt)
        return cls(attempt, now, ProcessMark.current())

    @property
    def is_over(self) -> bool:
        """Whether it is known that it publishes nothing any more."""
        if self.process is None:
            return False
        return self.attempt not in running if self.process.is_this else self.process.has_ended

    @classmethod
    def from_json(cls, attempt: object, told: object) -> Holder:
        if not isinstance(told, Mapping):
            return cls(str(attempt), 0.0)  # of an earlier version
        process = told.get("process")
        return cls(str(attempt), float(told["began"]), None if process is None else ProcessMark.from_json(process))

    def to_json(self) -> dict[str, Any]:
        """But for the attempt."""
        return {"began": self.began, **({"process": self.process.to_json()} if self.process else {})}


@dataclass(frozen=True, slots=True)
class Lease:
    """What `.attempt` says."""

    holder: Holder
    superseded: tuple[Holder, ...] = ()
    """Earlier tries that never committed and whose files may still lie about."""
    replaced: tuple[tuple[str, float], ...] = ()
    """(key, since) of files a commit replaced and that `keep_replaced_for` still keeps."""
    replacing: tuple[str, ...] = ()
    """Keys of the checkpoint found when the attempt began: one that is ended between its commit and the removal of
    these leaves them to the next."""
    made: tuple[str, ...] = ()
    """Files and folders at the root that the attempt makes under fixed names, and that were not there before."""

    @property
    def attempt(self) -> str:
        """The id of the attempt that has it."""
        return self.holder.attempt

    @property
    def began(self) -> float:
        """When that attempt began."""
        return self.holder.began

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "attempt": self.attempt,
                "plain": False,  # for earlier versions, which gave files names without an attempt
                **self.holder.to_json(),
                "superseded": [[holder.attempt, holder.to_json()] for holder in self.superseded],
                "replaced": self.replaced,
                "replacing": self.replacing,
                **({"made": self.made} if self.made else {}),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Lease | None:
        """None when it cannot be read: then nothing is known of earlier attempts, and nothing of theirs is removed."""
        try:
            fields = json.loads(data)
            return cls(
                Holder.from_json(fields["attempt"], fields),
                tuple(Holder.from_json(attempt, told) for attempt, told in fields["superseded"]),
                tuple((str(key), float(since)) for key, since in fields["replaced"] if may_be_removed(str(key))),
                tuple(key for key in map(str, fields.get("replacing", ())) if may_be_removed(key)),
                tuple(name for name in map(str, fields.get("made", ())) if may_be_removed(name) and "/" not in name),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None


def read_lease(backend: Backend, key: str = LEASE) -> Lease | None:
    """The lease under the key, by default the folder's; None where there is none that can be read."""
    data = read_or_none(backend, key)
    return None if data is None else Lease.from_bytes(data)


def leased_attempt(backend: Backend, key: str = LEASE) -> str | None:
    """The attempt that last took that lease; None where none did."""
    lease = read_lease(backend, key)
    return None if lease is None else lease.attempt


def may_be_removed(key: str) -> bool:
    """Whether a key that a file in the folder lists may be removed: whoever wrote that file may mean harm."""
    try:
        return checked_key(key) not in (METADATA, LEASE)
    except InvalidArgumentError:
        return False
