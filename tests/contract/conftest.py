"""The suite on NFS runs in a guest of its own, beside all other tests: started before them, asked for its result last."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.nfs import GuestRun, start_in_guest

FILES = ("nfs_contract", "nfs_freshness", "nfs_exchange", "nfs_faults")
_run = pytest.StashKey[GuestRun]()


def _is_waiting(item: pytest.Item) -> bool:
    return "nfs_suite" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Stable: of those that wait, and of those that do not, each keeps its place.
    items.sort(key=_is_waiting)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if session.config.option.collectonly or not any(map(_is_waiting, session.items)):
        return
    files = [f"tests/nfs/{name}.py" for name in FILES]
    pytest_command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", *files]
    session.config.stash[_run] = start_in_guest(pytest_command, timeout=900)


@pytest.fixture(scope="session")
def nfs_suite(request: pytest.FixtureRequest) -> GuestRun:
    """The run of `tests/nfs` on NFS, which was started with this session."""
    return request.config.stash[_run]


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    if _run in session.config.stash:
        session.config.stash[_run].stop()
