"""Remove the steps of a run that its policy has no use for, and what saves that did not finish left of older ones.

1. look, and judge            `retention.reasons_to_keep`; nothing goes unless the newest step is still whole
2. a mark on the step         whoever holds or reads it from now on sees that it goes
3. look at the marks          held, or being read, in between: it stays
4. remove it                  `remove`: metadata first, only what is proven to be hpdcp's, only the attempt judged
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpdcp._base.errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError, StorageError
from hpdcp._comm.identity import run_id
from hpdcp._manage._marks import REMOVING, marked
from hpdcp._manage._run_folder import Opening, RunFolder, open_run
from hpdcp._manage.remove import Removal, remove_checkpoint
from hpdcp._manage.retention import Keep, reasons_to_keep
from hpdcp._manage.step_record import StepRecord, StepState

__all__ = ["Pruning", "prune_run", "prune_steps", "remove_step"]


@dataclass(frozen=True, slots=True)
class Pruning:
    """What pruning a run removed, or would."""

    url: str
    removed: tuple[int, ...]
    """Steps, ascending; with `dry_run`, those that would go."""
    kept: Mapping[int, str]
    """Whole steps that stay → why."""
    left: Mapping[int, str]
    """Steps that the policy has no use for, and that stay all the same → why."""
    nbytes: int
    """Of what went, or would."""
    dry_run: bool = False


def prune_run(
    location: str | Path,
    keep: Keep,
    *,
    name: str | None = None,
    dry_run: bool = False,
    backend: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Pruning:
    """Remove the steps of the run that `keep` has no use for; from one process, whether or not the run goes on.

    Never the newest whole step, a held one, one that a load by `Checkpoints` reads, one that a job saved within the
    last ten minutes, nor anything that `Checkpoints` did not save.

    Args:
        location: the run's folder or URL.
        name: how its steps are called, as for `Checkpoints`; None: as most folders with a number are called there.
        backend, storage_options: as `FileSystemReader` takes them.

    Raises:
        CheckpointNotFoundError: no step is there.
        StorageError: the store failed in listing the steps; what it fails to remove is told in `Pruning.left`.
    """
    if not isinstance(keep, Keep):
        raise InvalidArgumentError(f"keep is a {type(keep).__qualname__}; expected a policy, as hpdcp.keep.latest(3).")
    opening = Opening(backend, storage_options)
    with open_run(location, name, opening) as folder:
        return prune_steps(folder, keep, opening, run=run_id(), dry_run=dry_run)


def prune_steps(
    folder: RunFolder,
    keep: Keep,
    opening: Opening,
    *,
    run: str,
    just_saved: int | None = None,
    in_flight: int | None = None,
    dry_run: bool = False,
) -> Pruning:
    """As `prune_run`.

    Args:
        run, just_saved: as for `reasons_to_keep`.
        in_flight: a step that is being saved, which stays.
    """

    def judged(records: Sequence[StepRecord]) -> tuple[dict[int, str], list[StepRecord], StepRecord | None]:
        newest = max((record for record in records if record.is_whole), key=lambda record: record.step, default=None)
        reasons = reasons_to_keep(records, keep, run=run, now=time.time(), just_saved=just_saved)
        due = [record for record in records if _is_due(record, reasons, newest) and record.step != in_flight]
        return reasons, due, newest

    reasons, due, newest = judged(folder.look())
    if due and newest is not None and not folder.is_still_whole(newest):
        # Somebody has removed it, or saves it anew: what is the newest now must not go for its sake.
        reasons, due, _ = judged(folder.look())
    removed: list[int] = []
    left: dict[int, str] = {}
    nbytes = 0
    for record in due:
        try:
            removal = remove_step(folder, record, opening, dry_run=dry_run)
        except CheckpointNotFoundError:
            continue  # somebody else was faster
        except (CheckpointError, StorageError) as error:
            left[record.step] = str(error)
            continue
        removed.append(record.step)
        nbytes += removal.nbytes
    kept = {step: reason for step, reason in reasons.items() if reason}
    return Pruning(folder.url, tuple(removed), kept, left, nbytes, dry_run)


def remove_step(folder: RunFolder, record: StepRecord, opening: Opening, *, dry_run: bool = False) -> Removal:
    """Remove one step, as it was when `record` was made.

    Raises:
        CheckpointExistsError, SupersededError, ...: as `remove_checkpoint`.
        CheckpointError: it is held, being read, or saved anew in between.
    """
    url = folder.url_of(record.folder)

    def as_judged(planned: Removal) -> bool:
        return not record.attempt or record.attempt in planned.attempts

    def remove() -> Removal:
        return remove_checkpoint(
            url,
            backend=opening.backend,
            storage_options=opening.storage_options,
            dry_run=dry_run,
            confirm=None if dry_run else as_judged,
        )

    if dry_run:
        return remove()
    with marked(folder.backend, REMOVING, record.folder) as marks:
        if record.folder in marks.held:
            raise CheckpointError(f"{url} is held: release it first.")
        if record.folder in marks.reading:
            raise CheckpointError(f"{url} is being read by a load: wait for it.")
        folder.backend.delete(marks.expired)
        removal = remove()
    if removal.dry_run:
        raise CheckpointError(f"{url} was saved anew in between, and stays.")
    return removal


def _is_due(record: StepRecord, reasons: Mapping[int, str], newest: StepRecord | None) -> bool:
    if record.is_whole:
        return not reasons[record.step]
    return record.state is StepState.TORN and not record.held and newest is not None and record.step < newest.step
