"""Small files beside the steps that say what holds, reads or removes one: `.hpdcp/KIND-FOLDER[.NONCE]`.

Names say everything, so one listing tells all of them. Whoever holds or reads a step leaves its mark first and then
looks whether somebody removes it; whoever removes one leaves a mark first and then looks whether somebody holds or
reads it. In whatever order the two come, one of them sees the other, and steps back.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from hpdcp._base.backend import Backend, KeyInfo
from hpdcp._base.errors import CheckpointNotFoundError, StorageError

MARKS: Final = ".hpdcp"
"""Their folder, below the run's location."""
HELD: Final = "held"
READING: Final = "reading"
REMOVING: Final = "removing"

EXPIRES: Final = {READING: 6 * 3600.0, REMOVING: 600.0}
"""Seconds after which the mark of a process counts as left by one that was killed. A load takes minutes, and the
removal of one step seconds."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The folders of steps that are marked, by kind."""

    held: frozenset[str] = frozenset()
    reading: frozenset[str] = frozenset()
    removing: frozenset[str] = frozenset()
    expired: tuple[str, ...] = ()
    """Keys of marks whose process is gone."""

    @classmethod
    def look(cls, backend: Backend, *, just_left: str | None = None) -> Marks:
        """By one listing.

        Args:
            just_left: a key that this process has published just now, whose time is the store's own. Without it marks
                are judged by this host's clock, which is good enough to show them.
        """
        try:
            infos = backend.list_keys(MARKS)
        except CheckpointNotFoundError:
            return cls()
        now = next((info.modified for info in infos if info.key == just_left), time.time())
        found: dict[str, set[str]] = {HELD: set(), READING: set(), REMOVING: set()}
        expired: list[str] = []
        for info in infos:
            kind, _, rest = info.key.removeprefix(f"{MARKS}/").partition("-")
            if kind not in found:
                continue
            if _is_expired(kind, info, now):
                expired.append(info.key)
            else:
                found[kind].add(rest if kind == HELD else rest.rpartition(".")[0])
        held, reading, removing = (frozenset(found[kind]) for kind in (HELD, READING, REMOVING))
        return cls(held, reading, removing, tuple(expired))


def _is_expired(kind: str, info: KeyInfo, now: float) -> bool:
    # Whichever way a clock has jumped, a mark does not stay for ever.
    return kind in EXPIRES and abs(now - info.modified) > EXPIRES[kind]


def held_key(folder: str) -> str:
    """The mark that holds a step; there is one, however often it is held."""
    return f"{MARKS}/{HELD}-{folder}"


@contextmanager
def marked(backend: Backend, kind: str, folder: str) -> Iterator[Marks]:
    """A mark of this process on a step, and what others had marked once it was there; goes at the end."""
    key = f"{MARKS}/{kind}-{folder}.{uuid.uuid4().hex[:16]}"
    backend.publish(key, b"")
    try:
        yield Marks.look(backend, just_left=key)
    finally:
        # A mark that stays expires.
        with suppress(StorageError):
            backend.delete([key])
