"""The lock under which a folder's files are compared and replaced: whoever ends while holding it blocks nobody."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpdcp._base.errors import StorageError
from hpdcp_backends._posix import locks
from hpdcp_backends._posix.locks import LOCK
from hpdcp_backends.local import LocalBackend


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    with LocalBackend(str(tmp_path)) as opened:
        yield opened


def hold(path: Path, *, spent: bool) -> int:
    """Hold the lock as a process in the middle of a publication does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.ftruncate(descriptor, int(spent))
    return descriptor


@pytest.mark.parametrize("spent", [False, True])
def test_a_lock_left_by_a_killed_process_is_taken_and_removed(
    backend: LocalBackend, tmp_path: Path, spent: bool
) -> None:
    os.close(hold(tmp_path / LOCK, spent=spent))
    backend.publish_if("key", b"new", expected=None)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_who_waits_for_a_lock_whose_file_was_removed_takes_another(backend: LocalBackend, tmp_path: Path) -> None:
    descriptor = hold(tmp_path / LOCK, spent=False)
    waiting = threading.Thread(target=backend.publish_if, args=("key", b"new"), kwargs={"expected": None})
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive()
    os.ftruncate(descriptor, 1)
    (tmp_path / LOCK).unlink()
    again = hold(tmp_path / LOCK, spent=False)
    os.close(descriptor)
    waiting.join(timeout=0.2)
    assert waiting.is_alive(), "it took a lock on a file without a name"
    os.close(again)
    waiting.join(timeout=30)
    assert backend.read("key") == b"new"


def test_a_lock_held_too_long_is_an_error_that_names_the_key(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE_SECONDS", 0.05)
    backend.publish("key", b"old")
    descriptor = hold(tmp_path / LOCK, spent=False)
    with pytest.raises(StorageError, match="'key'"):
        backend.publish_if("key", b"new", expected=b"old")
    os.close(descriptor)
    assert backend.read("key") == b"old"


def test_clearing_away_takes_a_lock_that_was_left_and_none_that_is_held(backend: LocalBackend, tmp_path: Path) -> None:
    descriptor = hold(tmp_path / LOCK, spent=False)
    backend.remove_leftovers(silent_for=0, belongs=lambda key: True)
    assert (tmp_path / LOCK).exists()
    os.close(descriptor)
    backend.remove_leftovers(silent_for=0, belongs=lambda key: True)
    assert not (tmp_path / LOCK).exists()


def test_a_file_system_without_locks_publishes_all_the_same_and_claims_nothing(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    assert backend.conditional_publish
    monkeypatch.setattr(fcntl, "flock", flock)
    backend.publish_if("key", b"new", expected=None)
    assert not backend.conditional_publish
    assert backend.read("key") == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
