"""Whether a signal has told this process that it will be taken away soon."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from hpdcp._base.errors import InvalidArgumentError


class SignalWatch:
    """Notes signals from `start` to `stop`; a handler that was there is called as well.

    A signal whose default is to end the process ends it no longer: whoever watches for it means to save first.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        try:
            self._signals = tuple(signal.Signals(number) for number in signals)
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                f"signals is {signals!r}; expected signals, such as (signal.SIGTERM, signal.SIGUSR1)."
            ) from None
        self._before: dict[signal.Signals, Any] = {}
        self.seen = False
        """Whether one of them has come."""

    @property
    def wanted(self) -> bool:
        """Whether there is any signal to watch for."""
        return bool(self._signals)

    def start(self) -> None:
        """Watch from now on. Python lets only the main thread of a process do so.

        Raises:
            InvalidArgumentError: another thread calls.
        """
        if not self._signals:
            return
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError(
                "signals can be watched from the main thread only: make the Checkpoints there, or pass signals=()."
            )
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)

    def stop(self) -> None:
        """Put the handlers back that were there, unless somebody has put others over these. Idempotent."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                # None: one that was not set from Python, which cannot be put back from there either.
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        before: Callable[[int, FrameType | None], object] | object = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
