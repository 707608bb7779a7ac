"""What every theme of the contract starts from: the backend, a second one beside it, and small helpers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from hpdcp._base.backend import Backend
from hpdcp._base.errors import KeyExistsError

LARGE: Final = 24 << 20
"""Bytes enough for every backend of ours to use several threads, or several parts."""


class BackendFixtures(ABC):
    """The backend under test, and another on the same root."""

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("override the fixture `backend`: it gives an instance on an empty, prepared root")

    @abstractmethod
    def reopen(self, backend: Backend) -> Backend:
        """A second instance on the root of `backend`, sharing nothing with it."""

    @pytest.fixture
    def other(self, backend: Backend) -> Iterator[Backend]:
        with self.reopen(backend) as other:
            yield other


def put(backend: Backend, key: str, data: bytes) -> None:
    """Store `data` under `key`."""
    backend.write(key, [memoryview(data)], size=len(data), exclusive=False)


def create_together(key: str, start: threading.Barrier, won: list[bytes], writer: Backend, content: bytes) -> None:
    """Create `key` when everybody else does; add `content` to `won` if that succeeded."""
    start.wait(timeout=30)
    try:
        writer.write(key, [memoryview(content)], size=len(content), exclusive=True)
    except KeyExistsError:
        return
    won.append(content)


def run_together(works: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own; what one of them raises is raised here."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
