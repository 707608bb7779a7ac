"""`hpdcp verify`: whether a checkpoint's bytes are those that were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from hpdcp._base import progress
from hpdcp._base.errors import CheckpointError, CheckpointNotFoundError
from hpdcp._manage.step_record import StepRecord, StepState
from hpdcp.commands.options import AsJson, BackendName, Bar, ShowBar, StorageOptions, Url
from hpdcp.commands.output import (
    count_of,
    leave_to_rank_0,
    print_json,
    rate_of,
    show,
    size_of,
    table_of,
    text_of,
)
from hpdcp.commands.run_options import located

if TYPE_CHECKING:
    from hpdcp._manage.verify import VerifyReport


def verify(
    url: Url,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    backend: BackendName = None,
    storage_options: StorageOptions = None,
) -> None:
    """Read every byte of a checkpoint, or of all steps of a run, and compare every checksum.

    Exit status 1 when something is damaged.
    """
    leave_to_rank_0()
    from hpdcp._files.reader import FileSystemReader
    from hpdcp._manage.verify import verify_checkpoint

    def verified(url: str) -> VerifyReport:
        reader = FileSystemReader(backend=backend, storage_options=storage_options)
        with progress.bar("verify", when=bar.value) as shown:
            return verify_checkpoint(url, reader=reader, on_progress=shown.reach)

    try:
        report = verified(located(url, backend, storage_options))
    except CheckpointNotFoundError:
        records = _steps(url, backend, storage_options)
        if not records:
            raise
        raise typer.Exit(0 if _verify_steps(records, verified, url, as_json=as_json) else 1) from None
    if as_json:
        print_json({**asdict(report), "is_sound": report.is_sound})
    else:
        show(*_verdict(report))
    raise typer.Exit(0 if report.is_sound else 1)


def _steps(url: str, backend: str | None, storage_options: dict[str, Any] | None) -> list[StepRecord]:
    """The steps of a run that is there, the newest first; none where some other folder is."""
    from hpdcp._manage.run_steps import list_steps

    try:
        records = list_steps(url, backend=backend, storage_options=storage_options)
    except CheckpointNotFoundError:
        return []
    return records[::-1] if any(record.saved_at is not None for record in records) else []


def _verify_steps(
    records: Sequence[StepRecord], verified: Callable[[str], VerifyReport], run: str, *, as_json: bool
) -> bool:
    """Whether every step that is whole is sound; a line, or a part of the document, for each step."""
    told: list[dict[str, object]] = []
    sound = True
    for record in records:
        problem, nbytes = "", 0
        if record.is_whole:
            try:
                report = verified(f"{run.rstrip('/')}/{record.folder}")
                nbytes = report.nbytes
                problem = "; ".join(f"{damage.key}: {damage.problem}" for damage in report.damages[:3])
            except CheckpointError as error:
                problem = str(error)
        elif record.state is StepState.DAMAGED:
            problem = record.why
        sound = sound and not problem
        state = "damaged" if problem else "sound" if record.is_whole else record.state.value
        why = problem or record.why or f"{size_of(nbytes)} compared"
        told.append({"step": record.step, "state": state, "why": why, "nbytes": nbytes})
        if not as_json:
            show(text_of(f"step {record.step}: {state}: {why}", "bold red" if problem else ""))
    if as_json:
        print_json({"run": run, "steps": told, "is_sound": sound})
    return sound


def _verdict(report: VerifyReport) -> Iterable[RenderableType]:
    compared = (
        f"{count_of(report.files, 'file')}, {size_of(report.nbytes)} in {count_of(report.blocks, 'block')} compared in "
        f"{rate_of(report.nbytes, report.seconds)}"
    )
    if report.damages:
        numbers = ("offset", "bytes")
        table = table_of("file", "problem", "of", *numbers, numbers=numbers)
        for damage in report.damages:
            table.add_row(
                text_of(damage.key), text_of(damage.problem), text_of(damage.fqn),
                *("" if number is None else str(number) for number in (damage.offset, damage.length)),
            )  # fmt: skip
        yield table
        yield Text()
        yield text_of(
            f"DAMAGED: {report.url}: {count_of(len(report.damages), 'problem')}; intact: {compared}", "bold red"
        )
    else:
        yield text_of(f"sound: {report.url}: {compared}", "bold green")
    if report.orphans:
        yield text_of(
            f"{count_of(len(report.orphans), 'file')} of saves that did not finish, not part of the checkpoint:"
        )
        yield from (text_of(f"  {key}") for key in report.orphans)
