"""Bars for long work: bytes moved, their rate and the time left, on the stderr of rank 0.

Off unless the configuration's `progress`, or a command's flag, asks for it; then tqdm draws it (`hpdcp[progress]`).

    with progress.bar("convert", total) as shown:
        ...
        shown.add(len(block))           # by hand,
        backend = counted(backend)      # or by what goes through a byte store

While a bar is shown, `counted` hands out byte stores that count; otherwise it returns the very store it was given, so
that nothing is paid for a bar that nobody asked for. The outermost bar counts for all that runs inside it. A bar never
decides over the work: where stderr is closed, or goes away, the bar is given up and the work goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, Final, TextIO, cast

from hpdcp._base import config
from hpdcp._base.backend import Backend, ByteRange, checked_buffers
from hpdcp._base.config import When
from hpdcp._base.errors import NotSupportedError
from hpdcp._base.timing import current_rank

STEP_BYTES: Final = 256 << 20
"""Most that one call of a store reads while a bar is shown: it moves when a call returns, and a call may be a file."""
_LINE_SECONDS: Final = 10.0
"""Between two lines where stderr is no terminal, and lines stay."""
_COLUMNS: Final = 80
_ROWS: Final = 24
"""The size of a terminal that does not know its own, as some containers' do not: tqdm would draw nothing."""


class Bar:
    """Progress of one task; may be told of it from several threads."""

    def __init__(self, total: int | None = None, shown: Any = None) -> None:
        self._total = total
        self._done = 0
        self._shown = shown
        self._lock = threading.Lock()
        if shown is not None:
            with self._kept_from_breaking():
                shown.refresh()

    def add(self, nbytes: int) -> None:
        """So many bytes more are done. What exceeds the total, such as headers, is not shown."""
        with self._lock:
            self._done += nbytes
            self._show()

    def reach(self, done: int, total: int | None = None) -> None:
        """`done` bytes are done in all; with `total`, of so many."""
        with self._lock:
            self._done = done
            self._total = self._total if total is None else total
            self._show()

    def _show(self) -> None:
        if self._shown is None:
            return
        done = self._done if self._total is None else min(self._done, self._total)
        with self._kept_from_breaking():
            self._shown.total = self._total
            self._shown.update(done - self._shown.n)

    def _end(self, *, whole: bool) -> None:
        with self._lock:
            if self._shown is not None:
                with self._kept_from_breaking():
                    if whole and self._total is not None:
                        self._shown.n = self._total
                    self._shown.close()  # draws it a last time
                self._shown = None

    @contextmanager
    def _kept_from_breaking(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # ValueError: "I/O operation on closed file"
            self._shown.disable = True  # or it would try once more when it is collected
            self._shown = None


_ACTIVE: Final[ContextVar[Bar | None]] = ContextVar("hpdcp_progress_bar", default=None)
_NOT_SHOWN: Final = Bar()


@contextmanager
def bar(label: str, total: int | Callable[[], int] | None = None, *, when: When | None = None) -> Iterator[Bar]:
    """A bar while the block runs, filled up when it ends well and left as it is when it raises.

    Args:
        label: what is being done, in a word or two.
        total: bytes; a callable is asked only where the bar is shown; None where nobody knows.
        when: `never`; `auto`: on a terminal; `always`: elsewhere too, as a line every 10 seconds. None: as configured.
            Always only on rank 0, and within another bar never.

    Raises:
        NotSupportedError: it is asked for, and tqdm is not installed.
    """
    wanted = config.current().progress if when is None else when
    check(wanted)
    stream = _stream(wanted) if _ACTIVE.get() is None and current_rank() == 0 else None
    if stream is None:
        yield _NOT_SHOWN
        return
    known = total() if callable(total) else total
    shown = Bar(known, _drawn(label, known, stream))
    token = _ACTIVE.set(shown)
    whole = False
    try:
        yield shown
        whole = True
    finally:
        _ACTIVE.reset(token)
        shown._end(whole=whole)


def check(when: When | None = None) -> None:
    """Raise what keeps this process from showing a bar that is asked for, before there is anything to show.

    Raises:
        NotSupportedError: tqdm is not installed.
    """
    wanted = config.current().progress if when is None else when
    if wanted != "never" and current_rank() == 0 and find_spec("tqdm") is None:
        raise NotSupportedError(
            f"progress = {wanted!r} asks for a bar, which needs the package tqdm: expected it to be installed, found "
            'none. Install it: pip install "hpdcp[progress]"; or set progress to "never".'
        )


def counted(backend: Backend) -> Backend:
    """`backend`, counting for the bar that is shown in this context; `backend` itself where none is."""
    shown = _ACTIVE.get()
    return backend if shown is None else cast(Backend, _Counted(backend, shown))


class _Counted:
    """A byte store that tells a bar what it moves. All that it does not count it leaves to the store itself."""

    def __init__(self, backend: Backend, shown: Bar) -> None:
        self._backend = backend
        self._add = shown.add

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def __repr__(self) -> str:
        return repr(self._backend)

    def read(self, key: str) -> bytes:
        data = self._backend.read(key)
        self._add(len(data))
        return data

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        for some, theirs in _steps(key, ranges, into):
            self._backend.read_ranges(key, some, theirs)
            self._add(sum(range_.length for range_ in some))

    def map_range(self, key: str, range_: ByteRange) -> memoryview | None:
        view = self._backend.map_range(key, range_)
        if view is not None:
            self._add(range_.length)
        return view

    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        self._backend.write(key, self._counted(buffers), size=size, exclusive=exclusive)

    def _counted(self, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        for buffer in buffers:
            yield buffer
            self._add(buffer.nbytes)  # once the next one is asked for, this one was taken


def _steps(
    key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]
) -> Iterator[tuple[Sequence[ByteRange], Sequence[memoryview]]]:
    """The same reads in calls of at most `STEP_BYTES` each; a longer range is cut."""
    if sum(range_.length for range_ in ranges) <= STEP_BYTES:
        yield ranges, into
        return
    some: list[ByteRange] = []
    theirs: list[memoryview] = []
    room = STEP_BYTES
    for range_, buffer in zip(ranges, checked_buffers(key, ranges, into), strict=True):
        start = 0
        while start < range_.length:
            length = min(room, range_.length - start)
            some.append(ByteRange(range_.offset + start, length))
            theirs.append(buffer[start : start + length])
            start += length
            room -= length
            if room == 0:
                yield some, theirs
                some, theirs, room = [], [], STEP_BYTES
    if some:
        yield some, theirs


def _stream(wanted: When) -> TextIO | None:
    """Where to draw; None where nothing is to be seen."""
    stream: TextIO | None = sys.stderr
    if wanted == "never" or stream is None:
        return None
    try:
        if stream.isatty():
            return stream
    except (ValueError, OSError):  # it is closed
        return None
    except AttributeError:  # something that only has a write(), put there to keep a copy of what is written
        pass
    return cast(TextIO, _Lines(stream)) if wanted == "always" else None


def _knows_its_size(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):  # it stands for a terminal, and is none
        return False


class _Lines:
    """Takes what tqdm draws for a terminal and writes it as lines, for a log."""

    encoding: Final = "ascii"
    """For tqdm, which draws with block characters where it may."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            self._stream.write(line + "\n")

    def flush(self) -> None:
        with contextlib.suppress(AttributeError):  # see `_stream`
            self._stream.flush()

    def isatty(self) -> bool:
        return False


def _drawn(label: str, total: int | None, stream: TextIO) -> Any:
    from tqdm import tqdm  # only now: most who use hpdcp never see a bar

    class Drawn(tqdm):  # type: ignore[misc, unused-ignore]  # untyped, unless its stubs are installed
        monitor_interval = 0  # no thread that looks after it: `miniters` does

    sized = _knows_its_size(stream)
    drawn = Drawn(
        desc=label,
        total=total,
        unit="iB",  # stands behind tqdm's K, M, G, which are powers of 1024 here
        unit_scale=True,
        unit_divisor=1024,
        miniters=1,
        mininterval=0.1 if stream.isatty() else _LINE_SECONDS,
        dynamic_ncols=sized,
        **({} if sized else {"ncols": _COLUMNS, "nrows": _ROWS}),
        leave=None,  # stays, unless it stands below somebody else's bar
        file=stream,
        delay=1e-9,  # draws nothing itself: that may fail
    )
    drawn.delay = 0
    return drawn
