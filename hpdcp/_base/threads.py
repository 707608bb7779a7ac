"""How many threads there may be, and threads that work in an interpreter that may be ending."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from hpdcp._base.errors import InvalidArgumentError

_Arguments = ParamSpec("_Arguments")
_Made = TypeVar("_Made")


class Threads(ThreadPoolExecutor):
    """A pool whose work is done by whoever submits it once the interpreter has begun to end.

    By then Python's own pools take nothing more, and a save in an `atexit` handler, or in a thread that outlives the
    main one, would fail.
    """

    def submit(
        self, fn: Callable[_Arguments, _Made], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Made]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            # Any other one, such as for want of threads, comes when the work is in the queue already.
            if "cannot schedule new futures" not in str(error):
                raise
        done: Future[_Made] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # for whoever asks for the result
            done.set_exception(error)
        return done


def spare_cores() -> int:
    """Cores this process may keep busy: those it may run on, shared with the ranks torchrun started beside it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise InvalidArgumentError(f"LOCAL_WORLD_SIZE is {text!r}; expected the number of ranks on this host.")
    return max(1, len(os.sched_getaffinity(0)) // int(text))
