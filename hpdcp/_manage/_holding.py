"""Hold a step, so that no retention removes it, and release it."""

from __future__ import annotations

from hpdcp._base.errors import CheckpointNotFoundError
from hpdcp._manage._marks import Marks, held_key
from hpdcp._manage._run_folder import RunFolder
from hpdcp._manage.step_record import StepRecord


def hold_step(folder: RunFolder, step: int) -> None:
    """Leave a mark on the step; it stays until `release_step`.

    Raises:
        CheckpointNotFoundError: there is no such step that is whole, or it is being removed just now.
    """
    found = whole_step(folder, step)
    key = held_key(found.folder)
    folder.backend.publish(key, b"")
    if found.folder in Marks.look(folder.backend, just_left=key).removing:
        folder.backend.delete([key])
        raise CheckpointNotFoundError(f"{folder.url_of(found.folder)} is being removed just now.")


def release_step(folder: RunFolder, step: int) -> None:
    """Remove the mark; nothing happens where there is none."""
    names = {folder.names.folder(step), *(record.folder for record in folder.look() if record.step == step)}
    folder.backend.delete(sorted(map(held_key, names)))


def whole_step(folder: RunFolder, step: int) -> StepRecord:
    """The record of this step.

    Raises:
        CheckpointNotFoundError: there is none that is whole; says what there is.
    """
    records = folder.look()
    found = next((record for record in records if record.step == step), None)
    if found is not None and found.is_whole:
        return found
    whole = [record.step for record in records if record.is_whole]
    shown = f"whole steps are {', '.join(map(str, whole[-10:]))}" if whole else "no step of it is whole"
    what = f"step {step} is not whole: {found.why}" if found is not None else f"there is no step {step}"
    raise CheckpointNotFoundError(f"{folder.url}: {what}; {shown}.")
