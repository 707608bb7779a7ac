"""What the worker's process takes over from its trainer's: variables, the module path, the configuration."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from hpdcp._base.config import Config

_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Whether torch imports the packages that bring devices when it is imported; they may fail where they see none."""
_WORKERS_OWN: Final = {"PYTHONPATH", _AUTOLOAD, *_DEVICES}

_FOR_THE_TRAINER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
"""Signals that a terminal or a scheduler sends to every process of a job: what they mean is for the trainer to say."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started within begin with those signals blocked, so that none ends them before they can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """In the worker: ignore what `signals_blocked` has held back."""
    for number in _FOR_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_TRAINER)


def worker_variables() -> dict[str, str]:
    """The variables that a worker is started with: the trainer's, no device, and where the trainer finds modules."""
    hidden = {**dict.fromkeys(_DEVICES, ""), _AUTOLOAD: "0"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(_search_path()), **hidden}


@dataclass(frozen=True, slots=True)
class CallEnvironment:
    """The trainer's process at one call of `async_save`."""

    config: bytes = b""
    """The configuration, pickled: options of third parties' backends may be anything."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Credentials are renewed there while the worker lives."""
    search_path: Sequence[str] = ()
    """Where modules are looked for: packages of backends may have been added."""
    umask: int | None = None
    """Which permissions new files do not get; None where the system does not tell."""

    @classmethod
    def current(cls, config: bytes) -> CallEnvironment:
        """Of this process, with its pickled configuration."""
        return cls(config, dict(os.environ), _search_path(), _umask())

    def settings(self) -> dict[str, Any]:
        """Arguments of `config.using` that make the worker's configuration the call's."""
        made: Config = pickle.loads(self.config)
        return {known.name: getattr(made, known.name) for known in dataclasses.fields(made)}

    def apply(self) -> None:
        """In the worker: take the variables, but for those that it was started with on purpose, the path, the umask."""
        if self.umask is not None:
            os.umask(self.umask)
        for name in os.environ.keys() - self.variables.keys() - _WORKERS_OWN:
            del os.environ[name]
        for name, value in self.variables.items():
            if name not in _WORKERS_OWN and os.environ.get(name) != value:
                os.environ[name] = value
        sys.path += [entry for entry in self.search_path if entry not in sys.path]
        importlib.invalidate_caches()


def _search_path() -> list[str]:
    """Where this process looks for modules, as another one can."""
    return [entry or os.getcwd() for entry in sys.path]


def _umask() -> int | None:
    """This process's, read without changing it: other threads create files meanwhile."""
    try:
        with open("/proc/self/status") as status:
            return next((int(line.split()[1], 8) for line in status if line.startswith("Umask:")), None)
    except OSError:
        return None
