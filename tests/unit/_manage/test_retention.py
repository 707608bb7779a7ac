"""Which steps a run keeps: each policy, their unions, and what goes before every policy."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._manage import _step_facts, _step_names, retention
from hpdcp._manage.retention import JUST_SAVED_SECONDS, Keep, best, every, hours, latest, reasons_to_keep, where
from hpdcp._manage.step_record import StepRecord, StepState

NOW = 1_800_000_000.0
LONG_AGO = NOW - 1e6


def record(step: int, saved_at: float | None = LONG_AGO, run: str = "mine", **metrics: float) -> StepRecord:
    return StepRecord(step, f"step_{step}", StepState.WHOLE, saved_at=saved_at, run=run, metrics=metrics)


def superfluous(*records: StepRecord, keep: Keep, now: float = NOW, just_saved: int | None = None) -> list[int]:
    reasons = reasons_to_keep(records, keep, run="mine", now=now, just_saved=just_saved)
    return [step for step, reason in reasons.items() if not reason]


@pytest.mark.parametrize("module", [retention, _step_names, _step_facts], ids=lambda module: module.__name__)
def test_the_examples_in_docstrings_hold(module: object) -> None:
    outcome = doctest.testmod(module)  # type: ignore[arg-type]
    assert outcome.attempted
    assert not outcome.failed


def test_latest_counts_from_the_end() -> None:
    assert superfluous(*map(record, range(10, 60, 10)), keep=latest(2)) == [10, 20, 30]


def test_every_goes_by_the_steps_number() -> None:
    assert superfluous(*map(record, [100, 150, 200, 250]), keep=every(100)) == [150]


def test_the_best_by_a_metric_stay_and_nan_is_none_of_them() -> None:
    run = [record(1, loss=0.1), record(2, loss=float("nan")), record(3, loss=0.1), record(4, loss=9.0), record(5)]
    assert superfluous(*run, keep=best("loss", lowest=True)) == [1, 2, 4]
    assert superfluous(*run, keep=best("loss")) == [1, 2, 3]
    assert superfluous(*run, keep=best("accuracy")) == [1, 2, 3, 4]


def test_of_each_stretch_of_hours_the_first_step_stays() -> None:
    times = [0.0, 1800.0, 3600.0, 3700.0, 9000.0, 9100.0]
    run = [record(step, saved_at=10 * 3600 + second) for step, second in enumerate(times)]
    assert superfluous(*run, keep=hours(1)) == [1, 3]


def test_a_clock_that_jumps_back_makes_more_steps_stay_never_fewer() -> None:
    straight = [record(step, saved_at=3600.0 * step) for step in range(6)]
    jumped = [*straight[:3], *(replace(each, saved_at=each.saved_at - 1e9) for each in straight[3:] if each.saved_at)]
    assert superfluous(*straight, keep=hours(2)) == [1, 3]
    assert set(superfluous(*jumped, keep=hours(2))) <= {1, 3, 4}


def test_a_predicate_sees_the_whole_record() -> None:
    run = [record(1), replace(record(2), user={"milestone": True}), record(3)]
    assert superfluous(*run, keep=where(lambda each: bool(each.user and each.user["milestone"]))) == [1]


def test_a_union_keeps_what_either_keeps_and_says_which_it_is() -> None:
    keep = latest(1) | every(100) | best("loss", 2, lowest=True)
    assert keep.text == "latest(1) | every(100) | best('loss', 2, lowest=True)"
    assert keep.lowest == {"loss": True}


@pytest.mark.parametrize("change", [{"held": True}, {"being_read": True}, {"saved_at": None}])
def test_what_is_held_or_read_or_not_of_a_run_stays(change: dict[str, object]) -> None:
    assert superfluous(replace(record(1), **change), record(2), keep=latest(1)) == []  # type: ignore[arg-type]


def test_what_another_job_has_just_saved_stays_and_what_this_one_saved_goes() -> None:
    for saved_at, stays in ((NOW - 1, True), (NOW + 1, True), (NOW - JUST_SAVED_SECONDS - 1, False)):
        assert superfluous(record(1, saved_at, run="other"), record(2), keep=latest(1)) == ([] if stays else [1])
        assert superfluous(record(1, saved_at), record(2), keep=latest(1)) == [1]


def test_a_time_in_the_far_future_is_a_clock_that_jumped_and_protects_nothing() -> None:
    assert superfluous(record(1, NOW + 1e9, run="other"), record(2), keep=latest(1)) == [1]


def test_a_run_that_was_set_back_keeps_the_step_it_has_just_saved() -> None:
    assert superfluous(*map(record, [10, 20, 30]), keep=latest(1), just_saved=10) == [20]


def test_of_steps_that_are_not_whole_nothing_is_said() -> None:
    torn = replace(record(9), state=StepState.TORN)
    assert set(reasons_to_keep([record(1), torn], latest(1), run="mine", now=NOW)) == {1}


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "3"])
def test_numbers_of_steps_are_whole_and_positive(wrong: object) -> None:
    for policy in (latest, every, lambda count: best("loss", count)):
        with pytest.raises(InvalidArgumentError, match="whole number from 1"):
            policy(wrong)  # type: ignore[arg-type]
    if not isinstance(wrong, float):
        with pytest.raises(InvalidArgumentError, match="hours above 0"):
            hours(wrong)  # type: ignore[arg-type]


policies = st.recursive(
    st.one_of(
        st.integers(1, 4).map(latest),
        st.integers(1, 5).map(every),
        st.floats(0.1, 10).map(hours),
        st.builds(lambda n, low: best("loss", n, lowest=low), st.integers(1, 3), st.booleans()),
    ),
    lambda inner: st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
    max_leaves=3,
)
runs = st.lists(
    st.builds(
        lambda saved_at, loss, run, held: replace(record(0, saved_at, run, loss=loss), held=held),
        st.floats(0, 1e6) | st.none(),
        st.floats(allow_infinity=True, allow_nan=True),
        st.sampled_from(["mine", "other"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
).map(lambda run: [replace(each, step=step) for step, each in enumerate(run)])


@given(runs, policies, st.floats(0, 2e6))
def test_removing_what_is_superfluous_makes_nothing_else_superfluous_but_time(
    run: list[StepRecord], keep: Keep, now: float
) -> None:
    gone = superfluous(*run, keep=keep, now=now)
    left = [each for each in run if each.step not in gone]
    assert left[-1] == run[-1]
    assert superfluous(*left, keep=keep, now=now) == []


@given(runs, policies, policies)
def test_a_union_keeps_exactly_what_either_keeps(run: list[StepRecord], one: Keep, other: Keep) -> None:
    assert (one | other).select(run) == one.select(run) | other.select(run)
