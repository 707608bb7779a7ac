"""One step of a run as its folder on storage tells of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["StepRecord", "StepState"]


class StepState(StrEnum):
    """What is in the folder of a step."""

    WHOLE = "whole"
    """A committed checkpoint."""
    SAVING = "saving"
    """A save began within the last day and has not committed: it may go on, or have been killed."""
    TORN = "torn"
    """What a save, or a removal, that did not finish left."""
    DAMAGED = "damaged"
    """Metadata that cannot be read."""
    UNREADABLE = "unreadable"
    """A checkpoint of a newer version of hpdcp."""
    FOREIGN = "foreign"
    """Something else under a step's name."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a run; every field but the first three is empty where `state` is not WHOLE."""

    step: int
    folder: str
    """Its name, below the run's location."""
    state: StepState
    why: str = ""
    """Of a step that is not whole: what was found."""
    saved_at: float | None = None
    """Seconds since the epoch, by the clock of rank 0 when the save was called; None: no `Checkpoints` saved it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    user: Any = None
    """What was given to `Checkpoints.save` as `user`."""
    run: str = ""
    """Which job saved it: a job that is started again is another one."""
    ranks: int = 0
    """How many saved it."""
    attempt: str = ""
    held: bool = False
    """Whether somebody holds it, so that no retention removes it."""
    being_read: bool = False
    """Whether a load reads it now."""
    being_removed: bool = False
    """Whether somebody removes it now."""
    nbytes: int | None = None
    """Of its files together, where that was asked for, whatever their state."""

    @property
    def is_whole(self) -> bool:
        """Whether it loads, as far as its metadata tells."""
        return self.state is StepState.WHOLE

    def to_json(self) -> dict[str, Any]:
        """What `from_json` makes an equal record of; JSON has no word for nan and inf, which are texts."""
        metrics = {name: value if math.isfinite(value) else repr(value) for name, value in self.metrics.items()}
        return {**asdict(self), "metrics": metrics}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> StepRecord:
        """The record that `to_json` was asked of."""
        metrics = {name: float(value) for name, value in fields["metrics"].items()}
        return cls(**{**fields, "state": StepState(fields["state"]), "metrics": metrics})
