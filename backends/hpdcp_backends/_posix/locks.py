"""The lock under which one process at a time compares a file and replaces it, which POSIX does not do in one step."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol, TypeVar

from hpdcp._base.backend import TEMPORARY_PREFIX
from hpdcp._base.timing import log_once

T = TypeVar("T")

LOCK: Final = TEMPORARY_PREFIX + "lock"
"""Name of the file that is locked; it is there while somebody publishes."""

_PATIENCE_SECONDS: Final = 60.0
"""A publication takes milliseconds, and the system takes the lock from a process that ends: who holds it for longer is
stopped, or its disk is."""
_SPENT_SECONDS: Final = 1.0
_LONGEST_PAUSE: Final = 0.05
_UNKNOWN: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY})
"""What file systems answer that have no locks."""


class _LookingUp(Protocol):
    """Runs what looks up a name, where a network file system may have it wrong at first."""

    def __call__(self, look: Callable[[], T], /) -> T: ...


class PublishingLock:
    """The lock of one folder, for all processes and hosts that the file system lets see each other's locks.

    Its file is removed by whoever held it, and another made by the next. A process may have the old one open still, and
    a network file system may go on showing its name: the holder marks it as spent before, so that nobody takes a lock
    on what has no name any more. One that was killed in between leaves a spent file under the name, which is taken into
    use again once it has been there for a second.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.works = True
        """Whether the file system has locks, as far as is known."""

    @contextlib.contextmanager
    def held(self, looking_up: _LookingUp) -> Iterator[None]:
        """A context that holds the lock, or nothing where the file system knows no locks.

        Raises:
            TimeoutError: somebody has held it for a minute.
        """
        descriptor = self._acquire(looking_up) if self.works else None
        try:
            yield
        finally:
            if descriptor is not None:
                self._spend(descriptor)

    def remove(self) -> None:
        """Remove the file that a killed process left; nothing happens while somebody holds the lock."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
            else:
                self._spend(descriptor)

    def _acquire(self, looking_up: _LookingUp) -> int | None:
        began = time.monotonic()
        pause = 0.0005
        while True:
            waited = time.monotonic() - began
            descriptor = looking_up(self._open)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_size == 0:
                    return descriptor
                if waited > _SPENT_SECONDS and self._is_named(descriptor, looking_up):
                    os.ftruncate(descriptor, 0)
                    return descriptor
                os.close(descriptor)
            except OSError as error:
                os.close(descriptor)
                if error.errno in _UNKNOWN:
                    self._told_unknown(error)
                    return None
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR, errno.ENOENT, errno.ESTALE):
                    raise
            if waited > _PATIENCE_SECONDS:
                raise TimeoutError(errno.ETIMEDOUT, "another process has been publishing there for a minute", self.path)
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _is_named(self, descriptor: int, looking_up: _LookingUp) -> bool:
        named, held = looking_up(lambda: os.stat(self.path, follow_symlinks=False)), os.fstat(descriptor)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def _told_unknown(self, error: OSError) -> None:
        self.works = False
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        log_once(
            logging.INFO,
            f"{os.path.dirname(self.path)}: this file system has no locks ({error}), so that of two jobs that commit "
            "there at the same moment neither hears of the other.",
        )

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def _spend(self, descriptor: int) -> None:
        """Let the lock go: mark its file, remove it, and close it, in this order."""
        try:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 1)
                os.unlink(self.path)
        finally:
            os.close(descriptor)
