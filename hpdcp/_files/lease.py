"""The lease of a folder, `.attempt`: who last began to save there, and which attempts it found.

No attempt waits for a lease. The newest one has it, and an older one that sees so publishes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from hpdcp._base.backend import Backend, checked_key
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._files.publish import read_or_none
from hpdcp._format.file_names import LEASE, METADATA

SILENT_SECONDS: Final = 24 * 3600
"""How long a superseded attempt must have written nothing before its files are removed: its process may still live."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What `.attempt` says."""

    attempt: str
    began: float
    """Seconds since the epoch, by the coordinator's clock."""
    superseded: tuple[str, ...] = ()
    """Earlier tries that never committed and whose files may still lie about."""
    replaced: tuple[tuple[str, float], ...] = ()
    """(key, since) of files a commit replaced and that `keep_replaced_for` still keeps."""
    replacing: tuple[str, ...] = ()
    """Keys of the checkpoint found when the attempt began: one that is ended between its commit and the removal of
    these leaves them to the next."""
    made: tuple[str, ...] = ()
    """Files and folders at the root that the attempt makes under fixed names, and that were not there before."""

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "attempt": self.attempt,
                "plain": False,  # for earlier versions, which gave files names without an attempt
                "began": self.began,
                "superseded": [[attempt, True] for attempt in self.superseded],
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
                str(fields["attempt"]),
                float(fields["began"]),
                tuple(str(attempt) for attempt, _ in fields["superseded"]),
                tuple((str(key), float(since)) for key, since in fields["replaced"] if may_be_removed(str(key))),
                tuple(key for key in map(str, fields.get("replacing", ())) if may_be_removed(key)),
                tuple(name for name in map(str, fields.get("made", ())) if may_be_removed(name) and "/" not in name),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None


def read_lease(backend: Backend) -> Lease | None:
    """The folder's lease; None where there is none that can be read."""
    data = read_or_none(backend, LEASE)
    return None if data is None else Lease.from_bytes(data)


def leased_attempt(backend: Backend) -> str | None:
    """The attempt that last leased the folder; None where none did."""
    lease = read_lease(backend)
    return None if lease is None else lease.attempt


def may_be_removed(key: str) -> bool:
    """Whether a key that a file in the folder lists may be removed: whoever wrote that file may mean harm."""
    try:
        return checked_key(key) not in (METADATA, LEASE)
    except InvalidArgumentError:
        return False
