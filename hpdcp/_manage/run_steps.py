"""Questions about a run from one process alone: which steps it has, where one of them lies; to hold and release one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hpdcp._base.errors import CheckpointError, CheckpointNotFoundError
from hpdcp._files.parallel import for_each_file
from hpdcp._manage._holding import hold_step, release_step, whole_step
from hpdcp._manage._run_folder import Opening, open_run
from hpdcp._manage.step_record import StepRecord

__all__ = ["hold", "list_steps", "locate_step", "release"]

_STEP_OF_RUN: Final = re.compile(r"(?P<run>.+[^/])@(?P<step>latest|[0-9]{1,18})", re.DOTALL)


def list_steps(
    location: str | Path,
    *,
    name: str | None = None,
    sizes: bool = False,
    backend: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[StepRecord]:
    """What there is of every step of a run, ascending.

    Args:
        location: the run's folder or URL.
        name: how its steps are called, as for `Checkpoints`; None: as most folders with a number are called there.
        sizes: count the bytes of each as well, which takes a listing of each.
        backend, storage_options: as `FileSystemReader` takes them.

    Raises:
        CheckpointNotFoundError: no folder there is called as a step.
    """
    with open_run(location, name, Opening(backend, storage_options)) as folder:
        records = folder.look()
        if not sizes:
            return records

        def counted(record: StepRecord) -> StepRecord:
            infos = folder.backend.list_keys(record.folder, recursive=True)
            return replace(record, nbytes=sum(info.size for info in infos))

        return for_each_file(folder.backend, counted, records)


def locate_step(
    location: str | Path,
    *,
    to_remove: bool = False,
    backend: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str | Path:
    """Where `RUN@latest`, or `RUN@500`, lies; any other location is given back as it is.

    A local folder that is itself called so is meant before any run.

    Raises:
        CheckpointNotFoundError: the run has no such step, or `latest` finds none that is whole; says what there is.
        CheckpointError: `to_remove`, and the step is held.
    """
    found = _STEP_OF_RUN.fullmatch(os.fspath(location))
    if found is None or os.path.lexists(os.path.expanduser(location)):
        return location
    with open_run(found["run"], None, Opening(backend, storage_options)) as folder:
        records = folder.look()
        if found["step"] == "latest":
            whole = [record for record in records if record.is_whole]
            if not whole:
                raise CheckpointNotFoundError(f"{folder.url}: no step of it is whole.")
            record = whole[-1]
        else:
            step = int(found["step"])
            record = next((each for each in records if each.step == step), None) or whole_step(folder, step)
        url = folder.url_of(record.folder)
        if to_remove and record.held:
            raise CheckpointError(f"{url} is held: release it first (hpdcp release {folder.url} {record.step}).")
        return url


def hold(
    location: str | Path,
    step: int,
    *,
    name: str | None = None,
    backend: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Have no retention remove this step of the run, of whatever job, until `release`.

    Args:
        location, name, backend, storage_options: as for `list_steps`.

    Raises:
        CheckpointNotFoundError: there is no such step that is whole, or it is being removed just now.
    """
    with open_run(location, name, Opening(backend, storage_options)) as folder:
        hold_step(folder, step)


def release(
    location: str | Path,
    step: int,
    *,
    name: str | None = None,
    backend: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Leave this step to retention again; nothing happens where nobody holds it."""
    with open_run(location, name, Opening(backend, storage_options)) as folder:
        release_step(folder, step)
