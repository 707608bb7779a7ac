"""The background worker, as its trainer sees it."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hpdcp._background._arena import Arena
from hpdcp._background._jobs import Job
from hpdcp._background._link import Link, Message
from hpdcp._background._staging import StagedState
from hpdcp._base.errors import WorkerDiedError

_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Whether torch imports the packages that bring devices when it is imported; they may fail where they see none."""


def search_path() -> list[str]:
    """Where this process looks for modules, as another one can."""
    return [entry or os.getcwd() for entry in sys.path]


def take_environment(variables: Mapping[str, str], path: Sequence[str]) -> None:
    """In the worker: have the trainer's variables, but for those that the worker was started with on purpose, and look
    for modules where it does."""
    own = {"PYTHONPATH", _AUTOLOAD, *_DEVICES}
    for name in os.environ.keys() - variables.keys() - own:
        del os.environ[name]
    for name, value in variables.items():
        if name not in own and os.environ.get(name) != value:
            os.environ[name] = value
    sys.path += [entry for entry in path if entry not in sys.path]
    importlib.invalidate_caches()


class WorkerProcess:
    """The background worker, as its trainer sees it."""

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.arena = Arena()
        self._sent_segments = 0
        self.plans: set[int] = set()
        """Ids of the plans it was given or made."""
        self._link, theirs = Link.pair()
        path = os.pathsep.join(search_path())
        hidden = {**dict.fromkeys(_DEVICES, ""), _AUTOLOAD: "0"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpdcp._background.worker", str(theirs.fileno()), self.incarnation],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, **hidden},
            )
        finally:
            theirs.forget()
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Raises WorkerDiedError when it could not start."""
        if not self._ready:
            try:
                self._link.receive()
            except EOFError:
                raise self.obituary() from None
            self._ready = True

    def submit(self, job: Job) -> None:
        """Hand the job over; WorkerDiedError when it is gone."""
        facts, payload = job.to_message()
        self._send("job", facts, payload)

    def supply(self, staged: StagedState) -> None:
        """Hand over what it asked for."""
        self._send("have", {}, staged.to_bytes())

    def refuse(self, reason: str) -> None:
        """Say that what it asked for cannot be had."""
        self._send("cannot", {"reason": reason}, b"")

    def _send(self, kind: str, facts: Mapping[str, Any], payload: bytes) -> None:
        """With the shared memory that it does not have yet."""
        new = self.arena.segments[self._sent_segments :]
        sizes = [segment.size for segment in new]
        try:
            self._link.send(kind, {**facts, "segments": sizes}, payload, [segment.descriptor for segment in new])
        except OSError:
            raise self.obituary() from None
        self._sent_segments += len(new)

    def answer(self) -> Message:
        """Its answer; EOFError when it died."""
        return self._link.receive()

    def obituary(self) -> WorkerDiedError:
        """What is known of its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return WorkerDiedError(
            f"the background worker {how} before the save was published; an earlier checkpoint is untouched. Look for "
            "its output above, or for the system's out-of-memory killer. The next async_save starts a new worker."
        )

    def stop(self, seconds: float) -> None:
        """Let it end, and wait; end it the hard way when it does not."""
        with contextlib.suppress(OSError):
            self._link.send("stop")
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._link.close()
        self.arena.close()

    def kill(self) -> None:
        self._process.kill()

    def forget(self) -> None:
        """In a forked child: it is the parent's worker, not ours."""
        # Else subprocess warns in the child that the process still runs, whenever this object is collected.
        self._process.returncode = 0
        self._link.forget()
