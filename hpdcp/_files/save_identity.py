"""What tells one save from all others: its attempt, and without collectives which save of which run it is."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass

from hpdcp._comm.identity import attempt_id, run_id
from hpdcp._plan.planner import PlannerContext

_ordinals: dict[tuple[str, str, int], itertools.count[int]] = {}
"""(run, location, world size) → this process's saves there, counted when they are called, so that all ranks agree."""


@dataclass(frozen=True, slots=True)
class SaveIdentity:
    """One save: settled when it was called in the background, else when it starts."""

    attempt: str
    """The same on all ranks; in a save of all ranks that is not in the background, the coordinator's is the one that
    counts."""
    run: str
    """Equal on all ranks of a run; counts without collectives."""
    ordinal: int
    """Which of the run's saves to this location without collectives."""


def next_ordinal(run: str, url: str, world_size: int) -> int:
    """Counts this process's saves to one location; what it saves alone is not counted with what all ranks save."""
    return next(_ordinals.setdefault((run, url, world_size), itertools.count(1)))


def new_identity(url: str, context: PlannerContext) -> SaveIdentity:
    """Of a save that starts now."""
    if context.collective:
        return SaveIdentity(uuid.uuid4().hex[:16], "", 0)
    return agreed_identity(url, context.world_size)


def agreed_identity(url: str, world_size: int) -> SaveIdentity:
    """Of a save that all ranks call now, the same on all of them; nobody waits for anybody."""
    run = run_id()
    ordinal = next_ordinal(run, url, world_size)
    return SaveIdentity(attempt_id(f"{run} {url}", ordinal, alone=world_size == 1), run, ordinal)
