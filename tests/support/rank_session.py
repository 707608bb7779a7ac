"""What one rank runs: the pytest session of one file, kept for as long as it is asked for tests, one by one.

    python -m tests.support.rank_session FILE

It is the other side of `tests.support.rank_group`, to which descriptor 0 leads. Setup, call and teardown are pytest's
own, and so is what lasts from test to test: fixtures of the module and of the session, the process group among them.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest

STACKS: Final = signal.SIGUSR2
"""The signal on which a rank writes down where all its threads are."""


class _Next(pytest.Item):
    """Stands for whatever test of the file comes next: it keeps the fixtures of the module and the session."""

    def runtest(self) -> None:
        raise AssertionError("it is never run")


class _OnDemand:
    """Runs the tests whose ids come in, and answers with their reports."""

    def __init__(self, caller: Connection) -> None:
        self._caller = caller
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._caller.send(None)  # there, with the file imported
        while (name := self._caller.recv()) is not None:
            item = items[name]
            assert item.parent is not None
            next_ = _Next.from_parent(item.parent, name="the next")
            self._reports = []
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=next_)
            self._caller.send(self._answer(session))
        self._end(session)
        return True

    def _answer(self, session: pytest.Session) -> tuple[list[dict[str, Any] | None], object]:
        to_data = session.config.hook.pytest_report_to_serializable
        data = [to_data(config=session.config, report=report) for report in self._reports]
        return data, session.shouldstop

    def _end(self, session: pytest.Session) -> None:
        """Let go of the fixtures that are left, and say how that went."""
        try:
            session._setupstate.teardown_exact(None)
        except BaseException as error:  # the caller raises it
            self._caller.send(repr(error))
            raise
        self._caller.send(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)


def main(arguments: Sequence[str]) -> int:
    faulthandler.register(STACKS, all_threads=True)
    caller = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    options = ["-q", "-s", "-p", "no:cacheprovider"]
    status = pytest.main([*options, arguments[0]], plugins=[_OnDemand(caller)])
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
