"""Stage times: one log line and one trace event per stage of a save or a load, per rank.

Two environment variables turn it on; with neither, a stage costs about three microseconds.

`HP_LOG_CONFIG=DCP:INFO` (comma-separated `NAME:LEVEL`; other names belong to other libraries and are left alone) sets
the level of the logger `hpdcp` and prints its records on stderr, where they cannot mix with a program's results:

    [INFO] [HP-DCP]: [rank=0] >>> func build_local_plan cost 0.0003 seconds

Without it hpdcp adds no handler and sets no level: the application's own logging decides, and Python's default shows
warnings. A `NullHandler` would hide those from everybody who has configured nothing, so there is none.

`HPDCP_TRACE=folder` writes `trace_rank<rank>_<process id>.json` there, in Chrome's trace event format, which Perfetto
and chrome://tracing open; several files can be opened together. Every event is in the file before the stage goes on,
and begins and ends are separate events, so the file of a process that was killed, or hangs, shows where.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, TextIO, TypeVar

from hpdcp._base._secrets import scrubbed
from hpdcp._base.errors import InvalidArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_LOGGER: Final = logging.getLogger("hpdcp")
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_EPOCH_NS: Final = time.time_ns() - time.perf_counter_ns()
"""Added to the monotonic clock, so that the traces of processes and hosts line up."""

_assigned_rank: int | None = None


def set_rank(rank: int | None) -> None:
    """Say which rank this process speaks for, where torch.distributed does not know; None takes it back."""
    global _assigned_rank
    _assigned_rank = rank


def current_rank() -> int:
    """What `set_rank` was told, else torch.distributed's rank once initialised, else the variable `RANK`, else 0."""
    if _assigned_rank is not None:
        return _assigned_rank
    # Looked up, not imported: hpdcp's background worker and its command line must start without paying for torch.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def log_message(level: int, text: str) -> None:
    """Log `text` on the logger `hpdcp`; under `HP_LOG_CONFIG` it is printed in the format of the stage lines."""
    _LOGGER.log(level, scrubbed(text))


@functools.cache
def log_once(level: int, text: str) -> None:
    """`log_message`, unless this process has logged the same text before."""
    log_message(level, text)


class stage:  # noqa: N801  # reads as a verb: `with stage("execute_write"):`
    """Times what it encloses and reports it under `name`; a stage left by an exception is reported as failed.

    Never raises and never swallows: a trace that cannot be written is given up with one warning.
    """

    __slots__ = ("_began", "_details", "_name", "_trace")

    def __init__(self, name: str, details: Mapping[str, int | float | str] | None = None) -> None:
        self._name = name
        self._details = details
        self._began = 0
        self._trace: _TraceFile | None = None

    def __enter__(self) -> stage:
        self._trace = _open_trace()
        self._began = time.perf_counter_ns()
        if self._trace is not None:
            self._trace.write("B", self._name, self._began, self._details)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended = time.perf_counter_ns()
        if self._trace is not None:
            self._trace.write("E", self._name, ended, None if kind is None else {"error": kind.__name__})
        if _LOGGER.isEnabledFor(logging.INFO):
            seconds = (ended - self._began) / 1e9
            if kind is None:
                _LOGGER.info("func %s cost %.4f seconds", self._name, seconds)
            else:
                _LOGGER.info("func %s failed after %.4f seconds: %s", self._name, seconds, kind.__name__)


def timed(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: every call of the function is a `stage` called `name`. The signature stays what it was."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with stage(name):
                return function(*args, **kwargs)

        return call

    return decorate


class _RankFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"[{record.levelname}] [HP-DCP]: [rank={current_rank()}] >>> {super().format(record)}"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is by then, so that redirection after import is honoured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_RankFormatter())

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure_logging(setting: str) -> None:
    """Apply a value of `HP_LOG_CONFIG`: entries `NAME:LEVEL`, of which only `DCP` is hpdcp's.

    Replaces what an earlier call set up.

    Raises:
        InvalidArgumentError: the entry for `DCP` has no level or one that does not exist.
    """
    for entry in setting.split(","):
        name, _, level = (part.strip().upper() for part in entry.partition(":"))
        if name != "DCP":
            continue
        if level not in _LEVELS:
            raise InvalidArgumentError(
                f"HP_LOG_CONFIG={setting!r}: expected a level after 'DCP:', one of {', '.join(_LEVELS)}; "
                f"found {level!r}. Write for example HP_LOG_CONFIG=DCP:INFO."
            )
        for handler in [h for h in _LOGGER.handlers if isinstance(h, _StderrHandler)]:
            _LOGGER.removeHandler(handler)
        _LOGGER.addHandler(_StderrHandler())
        _LOGGER.setLevel(level)


class _TraceFile:
    """One process's trace: a JSON array that is readable at any moment, since the format lets `]` be missing."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._named: set[tuple[int, int]] = set()
        self._file: int | None = None
        try:
            root = Path(folder)
            root.mkdir(parents=True, exist_ok=True)
            path = root / f"trace_rank{current_rank()}_{self._process}.json"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._give_up(error)
        self._separator = "[\n"
        atexit.register(self.close)

    def write(self, phase: str, name: str, at: int, details: Mapping[str, int | float | str] | None) -> None:
        rank, thread = current_rank(), threading.get_native_id()
        event: dict[str, object] = {
            "ph": phase, "name": name, "cat": "hpdcp", "ts": (at + _EPOCH_NS) / 1000, "pid": rank, "tid": thread,
        }  # fmt: skip
        if details:
            event["args"] = dict(details)
        with self._lock:
            if (rank, thread) not in self._named:
                self._named.add((rank, thread))
                self._append(_name_event("process_name", rank, thread, f"rank {rank}"))
                self._append(_name_event("thread_name", rank, thread, threading.current_thread().name))
            self._append(event)

    def close(self) -> None:
        """End the array, so that strict JSON readers take it too; nothing is written afterwards."""
        with self._lock:
            # A forked child runs its parent's exit handlers as well, and this file is not its own.
            if self._file is None or os.getpid() != self._process:
                return
            file, self._file = self._file, None
            try:
                os.write(file, b"\n]\n" if self._named else b"[]\n")
            except OSError as error:
                _LOGGER.warning("HPDCP_TRACE=%s: the trace could not be closed: %s", self.folder, error)
            finally:
                os.close(file)

    def _append(self, event: Mapping[str, object]) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, (self._separator + json.dumps(event)).encode())
        except OSError as error:
            self._give_up(error)
        self._separator = ",\n"

    def _give_up(self, error: OSError) -> None:
        # A stage runs between steps that all ranks share, where an exception of one rank would leave the rest waiting.
        _LOGGER.warning("HPDCP_TRACE=%s: no trace is written from here on: %s", self.folder, error)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _name_event(kind: str, rank: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


_trace_file: _TraceFile | None = None
_trace_lock = threading.Lock()


def _open_trace() -> _TraceFile | None:
    global _trace_file
    folder = os.environ.get("HPDCP_TRACE")
    if not folder:
        return None
    with _trace_lock:
        if _trace_file is None or _trace_file.folder != folder:
            if _trace_file is not None:
                _trace_file.close()
            _trace_file = _TraceFile(folder)
        return _trace_file


def _forget_trace() -> None:
    """A forked child starts a file of its own, with locks that no other thread can be holding."""
    global _trace_file, _trace_lock
    _trace_file, _trace_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_trace)
configure_logging(os.environ.get("HP_LOG_CONFIG", ""))
