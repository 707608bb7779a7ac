"""Bars: nothing unless asked for, every byte counted, and never in the way of the work."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hpdcp._base import progress, timing
from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.config import using
from hpdcp._base.errors import InvalidArgumentError, NotSupportedError
from hpdcp_backends.local import LocalBackend


class Recorder:
    """Stands where tqdm's bar does."""

    def __init__(self, label: str, total: int | None) -> None:
        self.label, self.total, self.n = label, total, 0
        self.seen: list[int] = []
        self.closed_at: int | None = None
        self.disable = False

    def refresh(self) -> None:
        pass

    def update(self, n: int) -> None:
        self.n += n
        self.seen.append(self.n)

    def close(self) -> None:
        self.closed_at = self.n


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """The bars that were drawn."""
    bars: list[Recorder] = []

    def draw(label: str, total: int | None, stream: object) -> Recorder:
        bars.append(Recorder(label, total))
        return bars[-1]

    monkeypatch.setattr(progress, "_drawn", draw)
    return bars


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    with LocalBackend(str(tmp_path)) as opened:
        yield opened


def put(backend: Backend, key: str, data: bytes) -> None:
    backend.write(key, [memoryview(data)], size=len(data), exclusive=False)


@pytest.mark.parametrize("when", ["never", "auto"])
def test_off_a_terminal_nothing_is_drawn_and_the_store_is_the_very_same(
    when: Any, backend: Backend, drawn: list[Recorder], capfd: pytest.CaptureFixture[str]
) -> None:
    with progress.bar("save", lambda: pytest.fail("nobody wants the total"), when=when) as shown:
        assert progress.counted(backend) is backend
        shown.add(3)
    assert drawn == []
    assert capfd.readouterr() == ("", "")


def test_by_default_nothing_is_drawn_even_on_a_terminal(
    backend: Backend, drawn: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.bar("save"):
        assert progress.counted(backend) is backend
    with progress.bar("save", when="auto"):
        pass
    assert [bar.label for bar in drawn] == ["save"]


def test_the_configuration_decides_unless_the_call_does(drawn: list[Recorder]) -> None:
    with using(progress="always"):
        with progress.bar("first", 1):
            pass
        with progress.bar("second", 1, when="never"):
            pass
    assert [bar.label for bar in drawn] == ["first"]


def test_only_rank_0_shows_a_bar(drawn: list[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_assigned_rank", 1)
    with progress.bar("save", 1, when="always"):
        pass
    assert drawn == []


def test_what_goes_through_the_store_is_counted(backend: Backend, drawn: list[Recorder]) -> None:
    data = random.Random(0).randbytes(1000)
    with progress.bar("all", 3350, when="always"):
        counted = progress.counted(backend)
        counted.write("a", [memoryview(data[:400]), memoryview(data[400:])], size=1000, exclusive=True)
        assert drawn[0].seen == [400, 1000]
        assert counted.read("a") == data
        assert drawn[0].n == 2000
        into = [bytearray(300), bytearray(50)]
        counted.read_ranges("a", [ByteRange(700, 300), ByteRange(0, 50)], [memoryview(b) for b in into])
        assert (into[0], into[1]) == (data[700:], data[:50])
        assert drawn[0].n == 2350
        view = counted.map_range("a", ByteRange(0, 1000))
        assert view is not None
        assert bytes(view) == data
        assert drawn[0].n == 3350
    assert drawn[0].closed_at == 3350


def test_a_long_read_moves_the_bar_on_the_way_and_reads_the_same(
    backend: Backend, drawn: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "STEP_BYTES", 100)
    rng = random.Random(1)
    data = rng.randbytes(2000)
    put(backend, "a", data)
    for _ in range(200):
        starts = [rng.randrange(2000) for _ in range(rng.randrange(1, 8))]
        ranges = [ByteRange(start, rng.randrange(2001 - start)) for start in starts]
        into = [bytearray(range_.length) for range_ in ranges]
        total = sum(range_.length for range_ in ranges)
        with progress.bar("load", total, when="always"):
            progress.counted(backend).read_ranges("a", ranges, [memoryview(buffer) for buffer in into])
        assert [bytes(buffer) for buffer in into] == [data[range_.offset : range_.stop] for range_ in ranges]
        steps = [b - a for a, b in zip([0, *drawn[-1].seen], drawn[-1].seen, strict=False)]
        assert all(step <= 100 for step in steps)
        assert sum(steps) == total


def test_a_long_read_into_buffers_that_do_not_fit_is_refused_as_ever(
    backend: Backend, drawn: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "STEP_BYTES", 1)
    put(backend, "a", b"abcd")
    with progress.bar("load", when="always"):
        counted = progress.counted(backend)
        with pytest.raises(InvalidArgumentError, match="2 bytes"):
            counted.read_ranges("a", [ByteRange(0, 4)], [memoryview(bytearray(2))])
        with pytest.raises(InvalidArgumentError, match="1 ranges, but 0 buffers"):
            counted.read_ranges("a", [ByteRange(0, 4)], [])


def test_all_that_a_store_has_is_there_while_it_is_counted(backend: Backend, drawn: list[Recorder]) -> None:
    counting = {"read", "read_ranges", "map_range", "write"}
    put(backend, "a", b"abc")
    with progress.bar("load", when="always"):
        counted = progress.counted(backend)
        names = [name for name in dir(Backend) if not name.startswith("_")] + ["url", "name"]
        assert counting < set(names)
        for name in names:
            if name not in counting:
                assert getattr(counted, name) == getattr(backend, name), name
        assert repr(counted) == repr(backend)
        assert counted.size("a") == 3
        assert [info.key for info in counted.list_keys()] == ["a"]


def test_what_exceeds_the_total_is_not_shown_and_a_good_end_fills_the_bar(drawn: list[Recorder]) -> None:
    with progress.bar("save", 10, when="always") as shown:
        shown.add(7)
        shown.add(7)
        assert drawn[0].n == 10
    with progress.bar("save", 10, when="always") as shown:
        shown.add(3)
    assert [bar.closed_at for bar in drawn] == [10, 10]


def test_an_error_closes_the_bar_where_it_stands(drawn: list[Recorder]) -> None:
    def fail() -> None:
        with progress.bar("save", 10, when="always") as shown:
            shown.add(4)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert drawn[0].closed_at == 4
    with progress.bar("next", 1, when="always"):
        pass
    assert len(drawn) == 2


def test_within_a_bar_another_is_not_drawn_and_its_bytes_count_for_the_outer_one(
    backend: Backend, drawn: list[Recorder]
) -> None:
    with progress.bar("convert", 6, when="always"):
        with progress.bar("save", 3, when="always"):
            put(progress.counted(backend), "a", b"abc")
        assert drawn[0].n == 3
    assert [bar.label for bar in drawn] == ["convert"]


def test_a_report_of_done_and_total_moves_the_bar(drawn: list[Recorder]) -> None:
    with progress.bar("verify", when="always") as shown:
        shown.reach(5, 20)
        assert (drawn[0].n, drawn[0].total) == (5, 20)
        shown.reach(12)
        assert drawn[0].n == 12
    assert drawn[0].closed_at == 20


@pytest.mark.parametrize("when", ["auto", "always"])
def test_without_tqdm_asking_for_a_bar_is_an_error_that_names_the_extra(
    when: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with using(progress=when), pytest.raises(NotSupportedError, match=r"tqdm.*hpdcp\[progress\]"):
        progress.check()
    with pytest.raises(NotSupportedError, match=r"hpdcp\[progress\]"), progress.bar("verify", when=when):
        pytest.fail("the block must not run")
    progress.check()


class _Gone(io.StringIO):
    """A terminal that is closed from the other side, after so many writes."""

    def __init__(self, writes: int, error: type[Exception]) -> None:
        super().__init__()
        self.left, self.error = writes, error

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error("gone")
        return super().write(text)


@pytest.mark.parametrize("writes", [0, 1, 2])
@pytest.mark.parametrize("error", [BrokenPipeError, ValueError, OSError])
def test_a_stderr_that_goes_away_does_not_stop_the_work(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, writes: int, error: type[Exception]
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    stream = _Gone(writes, error)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.bar("save", 12, when="always") as shown:
        for number in range(4):
            put(progress.counted(backend), str(number), b"abc")
    assert [info.size for info in backend.list_keys()] == [3, 3, 3, 3]
    assert stream.left < 0, "the bar never wrote so often"
    shown.add(1)


def test_no_stderr_at_all_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.bar("save", 12, when="always") as shown:
            shown.add(12)


class _Tee:
    """What some programs put in the place of stderr."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class _TerminalTee(_Tee):
    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "when", "drawn"),
    [(_Tee(), "auto", False), (_Tee(), "always", True), (_TerminalTee(), "auto", True)],
    ids=["a copy", "a copy of everything", "a copy that says it is a terminal"],
)
def test_something_in_place_of_stderr_will_do(
    stream: _Tee, when: Any, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.bar("save", 12, when=when) as shown:
        shown.add(12)
    assert ("save: 100%" in stream.text) is drawn


def test_lines_of_a_log_end_as_lines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.bar("save", 4 << 20, when="always") as shown:
        shown.add(1 << 20)
        shown.add(3 << 20)
    text = stream.getvalue()
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0].startswith("save:   0%")
    assert " 25%" in lines[1]
    assert "1.00M/4.00M" in lines[1]
    assert "iB/s" in lines[1]
    assert lines[-1].startswith("save: 100%")
    assert all(line.isascii() for line in lines)


def test_several_threads_may_tell_a_bar(drawn: list[Recorder]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with progress.bar("load", 100_000, when="always") as shown, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [shown.add(1) for _ in range(25_000)], range(4)))
        assert cast(Any, shown)._done == 100_000
    assert sorted(drawn[0].seen) == drawn[0].seen
