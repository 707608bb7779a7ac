"""One export at a time into one folder: a small hidden file that whoever exports there creates, and removes at the end.

An export's shards have the names that every tool expects, so two exports at a time would write over each other's. Who
comes second is refused. An export that was killed leaves its lease: it is taken over where its process is known to be
dead, and else after a day.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Final

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointExistsError, HpdcpError, KeyExistsError, SupersededError
from hpdcp._base.processes import ProcessMark
from hpdcp._base.timing import log_message
from hpdcp._files.lease import SILENT_SECONDS
from hpdcp._files.publish import read_or_none

LEASE: Final = ".hpdcp-export"

_running: Final[set[str]] = set()
"""Exports of this process that have not ended."""


class ExportLease:
    """The right to write an export to one folder. Exclusive where the store can create a key so (`conditional_create`);
    elsewhere the one that came last has it, and the other sees so before it completes a file or publishes."""

    def __init__(self, backend: Backend, data: bytes | None) -> None:
        self._backend = backend
        self._data = data

    @classmethod
    def acquire(cls, backend: Backend) -> ExportLease:
        """Take the lease, by the coordinator.

        Raises:
            CheckpointExistsError: another export is writing there; nothing was changed.
        """
        held = read_or_none(backend, LEASE)
        holder = None if held is None else _Holder.from_bytes(held)
        if holder is not None and not holder.is_over:
            raise _taken(backend, holder)
        export = uuid.uuid4().hex
        data = _Holder(export, time.time(), ProcessMark.current()).to_bytes()
        if not backend.conditional_create:
            backend.publish(LEASE, data)
        else:
            if holder is not None:
                backend.delete([LEASE])
            try:
                backend.write(LEASE, [memoryview(data)], size=len(data), exclusive=True)
            except KeyExistsError:
                raise _taken(backend, _Holder.from_bytes(read_or_none(backend, LEASE) or b"")) from None
        _running.add(export)
        return cls(backend, data)

    @classmethod
    def of_coordinator(cls, backend: Backend) -> ExportLease:
        """The lease that the coordinator has just taken, for another rank to look after."""
        return cls(backend, read_or_none(backend, LEASE))

    def check(self) -> None:
        """Raise where another export has taken it over.

        Raises:
            SupersededError: it has; what this export writes from here would be mixed with the other's.
        """
        if self._data is None or read_or_none(self._backend, LEASE) != self._data:
            raise SupersededError(
                f"{self._backend.url}: another export was begun there while this one ran. This one published nothing; "
                "export to a folder from one job at a time."
            )

    def release(self) -> None:
        """Let the next export in; by the coordinator, whatever came of this one."""
        if self._data is None:
            return
        _running.discard(_Holder.from_bytes(self._data).export)
        try:
            if read_or_none(self._backend, LEASE) == self._data:
                self._backend.delete([LEASE])
        except HpdcpError as error:
            log_message(logging.WARNING, f"{self._backend.url}: {LEASE} could not be removed: {error}")


def _taken(backend: Backend, holder: _Holder) -> CheckpointExistsError:
    process = holder.process
    whose = f", of process {process.pid} on {process.host!r}" if process else ""
    return CheckpointExistsError(
        f"{backend.url}: another export is writing there{whose}. Wait for it, or export to another folder. If you know "
        f"that it is dead, remove {LEASE} from the folder."
    )


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who has a lease."""

    export: str
    began: float
    """Seconds since the epoch, by its own clock."""
    process: ProcessMark | None
    """None where nothing is known of it."""

    @classmethod
    def from_bytes(cls, data: bytes) -> _Holder:
        """What a lease says; nothing is known of one that cannot be read."""
        try:
            told = json.loads(data)
            return cls(str(told["export"]), float(told["began"]), ProcessMark.from_json(told))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return cls("", time.time(), None)

    def to_bytes(self) -> bytes:
        process = self.process.to_json() if self.process else {}
        return json.dumps({"export": self.export, "began": self.began, **process}).encode()

    @property
    def is_over(self) -> bool:
        """Whether it is known to have ended."""
        if time.time() - self.began > SILENT_SECONDS:
            return True
        if self.process is None:
            return False
        return self.export not in _running if self.process.is_this else self.process.has_ended
