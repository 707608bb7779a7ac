"""The checkpoints of a run: saved, kept and found again."""

from hpdcp._manage.prune import (
    Pruning,
    prune_run,
)
from hpdcp._manage.run import Checkpoints
from hpdcp._manage.run_steps import (
    hold,
    list_steps,
    locate_step,
    release,
)
from hpdcp._manage.step_record import (
    StepRecord,
    StepState,
)

__all__ = [
    "Checkpoints",
    "StepRecord",
    "StepState",
    "list_steps",
    "locate_step",
    "hold",
    "release",
    "Pruning",
    "prune_run",
]
