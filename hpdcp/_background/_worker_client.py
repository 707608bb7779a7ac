"""The trainer's end of its background worker: start it, send it jobs, read its answers, stop it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from hpdcp._background._arena import Arena
from hpdcp._background._environment import signals_blocked, worker_variables
from hpdcp._background._messages import Message, MessageSocket
from hpdcp._background._sampled import Sampled
from hpdcp._background._save_job import SaveJob
from hpdcp._background._staging import StagedState
from hpdcp._base.errors import WorkerDiedError


class WorkerClient:
    """One worker process, and the shared memory that it reads. Starts the process at once and waits for nothing."""

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.arena = Arena()
        self._sent_segments = 0
        self.plans: set[int] = set()
        """Ids of the cached plans it has: those it was sent, and those it made."""
        self._socket, theirs = MessageSocket.pair()
        try:
            # A session of its own: what is sent to the trainer's process group is not for the worker, which ends when
            # the trainer does.
            with signals_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "hpdcp._background.worker", str(theirs.fileno()), self.incarnation],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=worker_variables(),
                    start_new_session=True,
                )
        finally:
            theirs.forget()
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def is_ready(self, seconds: float | None) -> bool:
        """Whether it has started, within so many seconds, or None for however long it takes.

        Raises:
            WorkerDiedError: it could not start.
        """
        if not self._ready and self._socket.has_message(seconds):
            try:
                self._socket.receive()
            except EOFError:
                raise self.death() from None
            self._ready = True
        return self._ready

    def submit(self, job: SaveJob) -> None:
        """Send it a job; WorkerDiedError when it died."""
        facts, payload = job.to_message()
        self._send("job", facts, payload)

    def send_wave(self, staged: StagedState) -> None:
        """Say where the items that it asked for lie; WorkerDiedError when it died."""
        self._send("staged", {}, staged.to_bytes())

    def send_samples(self, sampled: Sampled) -> None:
        """The checksums that it asked for; WorkerDiedError when it died."""
        self._send("sampled", {}, sampled.to_bytes())

    def refuse_wave(self, reason: str) -> None:
        """Say why the items that it asked for could not be staged; WorkerDiedError when it died."""
        self._send("not_staged", {"reason": reason}, b"")

    def give_up(self, attempt: str, reason: str) -> None:
        """Have it wait no longer for other ranks in that attempt; a worker that died hears nothing."""
        with contextlib.suppress(OSError):
            self._socket.send("give_up", {"attempt": attempt, "reason": reason})

    def _send(self, kind: str, facts: Mapping[str, Any], payload: bytes) -> None:
        """With the shared memory that it does not have yet."""
        new = self.arena.segments[self._sent_segments :]
        sizes = [segment.size for segment in new]
        try:
            self._socket.send(kind, {**facts, "segments": sizes}, payload, [segment.descriptor for segment in new])
        except OSError:
            raise self.death() from None
        self._sent_segments += len(new)

    def receive(self) -> Message:
        """The next message from it; EOFError when it died."""
        return self._socket.receive()

    def death(self) -> WorkerDiedError:
        """The error that says how it ended, once its connection has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return WorkerDiedError(
            f"the background worker {how}. Look for its output above, or for the system's out-of-memory killer. "
            "The next async_save starts another."
        )

    def stop(self, seconds: float) -> None:
        """Let it end, and wait at most so long; then kill it."""
        with contextlib.suppress(OSError):
            self._socket.send("stop")
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        self.arena.close()

    def kill(self) -> None:
        self._process.kill()

    def forget(self) -> None:
        """In a forked child: it is the parent's worker, not ours."""
        # Else subprocess warns in the child that the process still runs, whenever this object is collected.
        self._process.returncode = 0
        self._socket.forget()
