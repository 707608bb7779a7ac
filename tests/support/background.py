"""Commands that run beside the other tests, for those that take minutes of little but waiting for a slow machine.

    @pytest.mark.in_background("tests/services/nfs_run", "--", "tests/nfs/matrix.sh", sys.executable, timeout=400)
    def test_two_ranks_on_two_clients(background: BackgroundRun) -> None:
        assert "20 passed" in background.output()

Such tests come last, whatever order they were collected in. Their commands are started with the session, one at a time,
in the order of the tests; each has `timeout` seconds of its own. They end with the session, and if pytest is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Generator, Sequence
from typing import Final

import pytest

from tests.support.ranks import ROOT

_MARK: Final = "in_background"
_TAIL: Final = 12_000
"""Characters of output shown of a run that failed."""
_RUNS: Final = pytest.StashKey["_Queue"]()
_POLITE_SECONDS: Final = 10
"""For a command to end what it has started, before it is killed."""


class BackgroundRun:
    """One command, its output, and how it ended."""

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._command = list(command)
        self._timeout = timeout
        self._ended = threading.Event()
        self._status: int | None = None
        self._text = "it was never started"
        self._process: subprocess.Popen[bytes] | None = None

    def output(self) -> str:
        """Everything it printed, once it has ended well.

        Raises:
            AssertionError: it ended with another status than 0, or its time was up; ends with its last output.
        """
        self._ended.wait()
        command = " ".join(self._command)
        assert self._status is not None, f"{command}\nran longer than {self._timeout:g} s: {self._text[-_TAIL:]}"
        assert self._status == 0, f"{command}\nexited with {self._status}; it ended with:\n{self._text[-_TAIL:]}"
        return self._text

    def run(self, stopping: threading.Event) -> None:
        """Run it to its end; from a thread that lives as long as the session, for that is whom it dies with."""
        try:
            with tempfile.TemporaryFile("w+", errors="replace") as out:
                # setpriv, as Python may not run between fork and exec in a process with threads.
                self._process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "TERM", *self._command],
                    cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                if stopping.is_set():
                    self.stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._status = self._process.wait(self._timeout)
                self.stop()
                out.seek(0)
                self._text = out.read()
        except OSError as error:
            self._status, self._text = 127, str(error)
        finally:
            self._ended.set()

    def stop(self) -> None:
        """End it, first by asking."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_POLITE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Queue:
    """Runs the commands of a session, one after the other, in a thread of its own."""

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        self.runs: dict[str, BackgroundRun] = {}
        for item in items:
            mark = item.get_closest_marker(_MARK)
            if mark is not None:
                self.runs[item.nodeid] = BackgroundRun(mark.args, mark.kwargs["timeout"])
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="background runs", daemon=True)
        if self.runs:
            self._thread.start()

    def _run(self) -> None:
        for run in self.runs.values():
            if self._stopping.is_set():
                return
            run.run(self._stopping)

    def stop(self) -> None:
        self._stopping.set()
        for run in self.runs.values():
            run.stop()
        if self._thread.ident is not None:
            self._thread.join()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{_MARK}(*command, timeout): runs the command beside the other tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker(_MARK) is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    if session.config.option.collectonly:
        return (yield)
    queue = session.config.stash[_RUNS] = _Queue(session.items)
    try:
        return (yield)
    finally:
        queue.stop()


@pytest.fixture
def background(request: pytest.FixtureRequest) -> BackgroundRun:
    """The run of the test's own mark."""
    return request.config.stash[_RUNS].runs[request.node.nodeid]
