"""When a run saves: every so many steps or seconds, when the user's function says so, and when a signal has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from hpdcp._base.arguments import require_count
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._comm.exchange import Alone, Exchange
from hpdcp._manage._preemption import SignalWatch

When = Callable[[int, float], bool]


class Schedule:
    """Answers `due` alike on every rank.

    Steps are counted by each rank for itself. Whatever ranks may see differently, clocks and signals, they tell one
    another, by one small all-reduce in every `interval` calls.
    """

    def __init__(self, every: int | timedelta | None, when: When | None, watch: SignalWatch, interval: int) -> None:
        self._every_steps, self._every_seconds = _parsed(every)
        if when is not None and not callable(when):
            raise InvalidArgumentError(f"when is a {type(when).__qualname__}; expected a function of (step, seconds).")
        require_count("signal_interval", interval)
        self._when = when
        self._watch = watch
        self._interval = interval
        self._calls = 0
        self._last = time.monotonic()
        self.stopping = False
        """Whether all ranks know that one of them has got a signal."""

    def note_save(self) -> None:
        """Seconds are counted from now on."""
        self._last = time.monotonic()

    def due(self, step: int, exchange: Exchange) -> bool:
        """Whether all ranks save at this step; each of them asks, at the same steps."""
        self._calls += 1
        by_steps = self._every_steps is not None and step > 0 and step % self._every_steps == 0
        asks = self._watch.wanted or self._when is not None or self._every_seconds is not None
        if not asks or (self._calls % self._interval and not isinstance(exchange, Alone)):
            return by_steps
        least, most = exchange.min_max(
            "asking whether to save",
            3,
            lambda: [step, exchange.is_coordinator and self._by_time(step), self._watch.seen],
        )
        if least[0] != most[0]:
            raise InvalidArgumentError(
                f"due() was asked for step {least[0]} on one rank and for step {most[0]} on another: all ranks have to "
                "ask for the same steps."
            )
        begins_to_stop = bool(most[2]) and not self.stopping
        self.stopping = self.stopping or begins_to_stop
        return by_steps or bool(most[1]) or begins_to_stop

    def _by_time(self, step: int) -> bool:
        seconds = time.monotonic() - self._last
        if self._every_seconds is not None and seconds >= self._every_seconds:
            return True
        return self._when is not None and bool(self._when(step, seconds))


def _parsed(every: object) -> tuple[int | None, float | None]:
    """(steps, seconds), of which one at most is given."""
    if every is None:
        return None, None
    if isinstance(every, timedelta) and every.total_seconds() > 0:
        return None, every.total_seconds()
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every, None
    raise InvalidArgumentError(
        f"every is {every!r}; expected a number of steps, such as 500, or a timedelta, such as timedelta(minutes=30)."
    )
