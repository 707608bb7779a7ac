"""Which steps of a run are kept: policies, and what goes before every policy. Pure functions over step records.

>>> from hpdcp._manage.step_record import StepState
>>> run = [
...     StepRecord(step, f"step_{step}", StepState.WHOLE, saved_at=float(step), metrics={"loss": loss}, run="a")
...     for step, loss in [(100, 0.9), (200, 0.2), (300, 0.5), (400, 0.4)]
... ]
>>> sorted((latest(1) | every(200) | best("loss", 1, lowest=True)).select(run))
[200, 400]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._manage.step_record import StepRecord

__all__ = ["JUST_SAVED_SECONDS", "Keep", "best", "every", "hours", "latest", "reasons_to_keep", "where"]

JUST_SAVED_SECONDS: Final = 600.0
"""How long what another job saved is left alone. A time further in the future is a clock that jumped."""

Select = Callable[[Sequence[StepRecord]], AbstractSet[int]]


@dataclass(frozen=True)
class Keep:
    """Which steps a run keeps; `a | b` keeps what either does."""

    text: str
    select: Select = field(repr=False)
    """From the whole steps, ascending, those that are kept."""
    lowest: Mapping[str, bool] = field(default_factory=dict, repr=False)
    """Metric → whether its lowest value is the best, of metrics that a policy goes by."""

    def __or__(self, other: Keep) -> Keep:
        if not isinstance(other, Keep):
            return NotImplemented
        mine, theirs = self.select, other.select
        return Keep(
            f"{self.text} | {other.text}", lambda steps: mine(steps) | theirs(steps), {**self.lowest, **other.lowest}
        )


def latest(count: int) -> Keep:
    """The `count` latest steps."""
    _require_count("latest", count)
    return Keep(f"latest({count})", lambda steps: {record.step for record in steps[-count:]})


def every(steps: int) -> Keep:
    """Steps that are multiples of `steps`."""
    _require_count("every", steps)
    return Keep(f"every({steps})", lambda records: {r.step for r in records if r.step % steps == 0})


def hours(count: float) -> Keep:
    """Of each stretch of `count` hours the first step. A clock that jumped begins another stretch."""
    if not _is_number(count) or not 0 < count < math.inf:
        raise InvalidArgumentError(f"hours({count!r}): expected a number of hours above 0.")

    def select(steps: Sequence[StepRecord]) -> set[int]:
        first: dict[int, int] = {}
        for record in steps:
            if record.saved_at is not None:
                first.setdefault(math.floor(record.saved_at / (count * 3600)), record.step)
        return set(first.values())

    return Keep(f"hours({count})", select)


def best(metric: str, count: int = 1, *, lowest: bool = False) -> Keep:
    """The `count` steps with the highest value of `metric`, or the lowest; of equal ones the later step.

    Steps without that metric, or with nan, are none of them.
    """
    _require_count("best", count)

    def select(steps: Sequence[StepRecord]) -> set[int]:
        return {record.step for record in ranked(steps, metric, lowest=lowest)[:count]}

    return Keep(f"best({metric!r}, {count}{', lowest=True' if lowest else ''})", select, {metric: lowest})


def where(keep: Callable[[StepRecord], bool]) -> Keep:
    """Steps for which `keep(record)` is true."""
    return Keep(
        f"where({getattr(keep, '__name__', keep)})", lambda steps: {record.step for record in steps if keep(record)}
    )


def ranked(steps: Sequence[StepRecord], metric: str, *, lowest: bool) -> list[StepRecord]:
    """The steps that have the metric, the best first."""
    known = [record for record in steps if not math.isnan(record.metrics.get(metric, math.nan))]
    sign = 1 if lowest else -1
    return sorted(known, key=lambda record: (sign * record.metrics[metric], -record.step))


def reasons_to_keep(
    records: Sequence[StepRecord], keep: Keep, *, run: str, now: float, just_saved: int | None = None
) -> dict[int, str]:
    """Each whole step → why it stays; empty text: it is superfluous. Of other steps nothing is said.

    The newest whole one stays whatever the policy says. So no number of pruners, whatever each has been told, remove
    the last one: what one removes is older than a step that it saw whole, and the newest of all is removed by nobody.

    Args:
        run: the job that asks; what it saved itself is judged by the policy alone.
        now: seconds since the epoch.
        just_saved: a step that stays, wherever it comes in the order: a run that was set back saves lower ones.
    """
    whole = sorted((record for record in records if record.is_whole), key=lambda record: record.step)
    wanted = keep.select(whole)

    def reason(record: StepRecord) -> str:
        if record.step == whole[-1].step:
            return "the newest"
        if record.saved_at is None:
            return "not saved by hpdcp.Checkpoints"
        if record.held:
            return "held"
        if record.step in wanted:
            return keep.text
        if record.step == just_saved:
            return "just saved"
        if record.being_read:
            return "a load reads it"
        if record.run != run and abs(now - record.saved_at) < JUST_SAVED_SECONDS:
            return "another job just saved it"
        return ""

    return {record.step: reason(record) for record in whole}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_count(name: str, count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InvalidArgumentError(f"{name}({count!r}): expected a whole number from 1.")
