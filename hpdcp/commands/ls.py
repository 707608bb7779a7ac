"""`hpdcp ls`: the steps of a run, and `hpdcp hold` and `hpdcp release`, which say of one that it stays."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import RenderableType

from hpdcp._manage.step_record import StepRecord
from hpdcp.commands.options import AsJson, BackendName, StorageOptions
from hpdcp.commands.output import count_of, cut_off, leave_to_rank_0, print_json, show, size_of, table_of, text_of
from hpdcp.commands.run_options import Run, Step, StepName

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def ls(
    run: Run,
    name: StepName = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=0, help="Show only the N newest steps.")
    ] = None,
    as_json: AsJson = False,
    backend: BackendName = None,
    storage_options: StorageOptions = None,
) -> None:
    """Show the steps of a run, the newest first: age, size, ranks, state (whole, torn, held, ...), metrics."""
    leave_to_rank_0()
    from hpdcp._manage.run_steps import list_steps

    records = list_steps(run, name=name, sizes=True, backend=backend, storage_options=storage_options)[::-1]
    if as_json:
        print_json([record.to_json() for record in records[:limit]])
    else:
        show(*_table(records, limit))


def hold(
    run: Run,
    step: Step,
    name: StepName = None,
    backend: BackendName = None,
    storage_options: StorageOptions = None,
) -> None:
    """Hold a step of a run: no retention removes it, of whatever job, until it is released."""
    leave_to_rank_0()
    from hpdcp._manage.run_steps import hold as hold_step

    hold_step(run, step, name=name, backend=backend, storage_options=storage_options)
    show(text_of(f"held: step {step} of {run}"))


def release(
    run: Run,
    step: Step,
    name: StepName = None,
    backend: BackendName = None,
    storage_options: StorageOptions = None,
) -> None:
    """Release a step of a run that is held."""
    leave_to_rank_0()
    from hpdcp._manage.run_steps import release as release_step

    release_step(run, step, name=name, backend=backend, storage_options=storage_options)
    show(text_of(f"released: step {step} of {run}"))


def _table(records: Sequence[StepRecord], limit: int | None) -> Iterator[RenderableType]:
    numbers = ("step", "age", "bytes", "ranks")
    table = table_of(*numbers, "state", "metrics", numbers=numbers)
    now = time.time()
    for record in records[:limit]:
        table.add_row(
            str(record.step),
            "" if record.saved_at is None else age_of(now - record.saved_at),
            size_of(record.nbytes or 0),
            str(record.ranks or ""),
            text_of(state_of(record)),
            text_of(" ".join(f"{name}={value:.6g}" for name, value in record.metrics.items())),
        )
    yield from cut_off(table, len(records), "step")
    whole = sum(record.is_whole for record in records)
    nbytes = sum(record.nbytes or 0 for record in records)
    yield text_of(f"{count_of(len(records), 'step')}, {whole:,} whole, {size_of(nbytes)}")


def state_of(record: StepRecord) -> str:
    """In a few words, with the reason where it is not whole."""
    also = {"held": record.held, "being read": record.being_read, "being removed": record.being_removed}
    words = ", ".join([record.state.value, *(word for word, so in also.items() if so)])
    return f"{words}: {record.why}" if record.why else words


def age_of(seconds: float) -> str:
    """How long ago, for people.

    >>> [age_of(seconds) for seconds in (-5, 59, 90, 7200, 200_000)]
    ['0 s', '59 s', '2 min', '2 h', '2 d']
    """
    seconds = max(0.0, seconds)
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
