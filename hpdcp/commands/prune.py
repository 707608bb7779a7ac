"""`hpdcp prune`: remove the steps of a run that nobody has a use for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._manage.retention import Keep, best, every, hours, latest
from hpdcp.commands.options import AsJson, BackendName, DryRun, StorageOptions
from hpdcp.commands.output import count_of, leave_to_rank_0, note, plain, print_json, show, size_of, table_of, text_of
from hpdcp.commands.run_options import Run, StepName

if TYPE_CHECKING:
    from hpdcp._manage.prune import Pruning


def prune(
    run: Run,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Keep the N latest steps.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", min=1, help="Keep steps that are multiples of N.")
    ] = None,
    keep_hours: Annotated[
        float | None, typer.Option("--keep-hours", metavar="H", help="Keep the first step of each stretch of H hours.")
    ] = None,
    keep_highest: Annotated[
        list[str] | None,
        typer.Option("--keep-highest", metavar="METRIC[:N]", help="Keep the N best by a metric; may be repeated."),
    ] = None,
    keep_lowest: Annotated[
        list[str] | None,
        typer.Option("--keep-lowest", metavar="METRIC[:N]", help="The same where low is good, as for a loss."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    dry_run: DryRun = False,
    name: StepName = None,
    as_json: AsJson = False,
    backend: BackendName = None,
    storage_options: StorageOptions = None,
) -> None:
    """Remove the steps of a run that none of the --keep options keeps. Asks first, unless --yes is given.

    The newest whole step stays in any case; so does what is held, what a load reads, what a job has just saved, and
    what hpdcp.Checkpoints did not save.
    """
    leave_to_rank_0()
    policies = _policies(keep_last, keep_every, keep_hours, keep_highest or (), keep_lowest or ())
    if not policies:
        raise InvalidArgumentError("say which steps stay, as with --keep-last 3; several options keep what any keeps.")
    if not (yes or dry_run or sys.stdin.isatty()):
        raise InvalidArgumentError("there is no terminal to ask on: give --yes to remove them, or --dry-run to look.")
    keep = reduce(or_, policies)
    from hpdcp._manage.prune import prune_run

    def pruned(*, dry_run: bool) -> Pruning:
        return prune_run(run, keep, name=name, dry_run=dry_run, backend=backend, storage_options=storage_options)

    done = pruned(dry_run=True)
    if not dry_run:
        if done.removed and not yes and not typer.confirm(f"Remove {_what(done)}?", err=True):
            note("nothing was removed.")
            raise typer.Exit(1)
        done = pruned(dry_run=False)
    if as_json:
        print_json(asdict(done))
    else:
        show(*_report(done))


def _policies(
    last: int | None, multiple: int | None, stretch: float | None, highest: Sequence[str], lowest: Sequence[str]
) -> list[Keep]:
    given: list[Keep] = []
    if last is not None:
        given.append(latest(last))
    if multiple is not None:
        given.append(every(multiple))
    if stretch is not None:
        given.append(hours(stretch))
    given += [_best(text, "--keep-highest", lambda *metric: best(*metric)) for text in highest]
    given += [_best(text, "--keep-lowest", lambda *metric: best(*metric, lowest=True)) for text in lowest]
    return given


def _best(text: str, option: str, make: Callable[[str, int], Keep]) -> Keep:
    metric, colon, count = text.rpartition(":")
    if not colon:
        return make(text, 1)
    if not (metric and count.isascii() and count.isdigit() and int(count[:9]) > 0):
        raise InvalidArgumentError(f"{option} {text!r}: expected METRIC or METRIC:N, as in loss:2.")
    return make(metric, int(count))


def _what(pruning: Pruning) -> str:
    steps = ", ".join(map(str, pruning.removed[:10])) + (", …" if len(pruning.removed) > 10 else "")
    many = count_of(len(pruning.removed), "step")
    return plain(f"{many} of {pruning.url}" + (f" ({steps}), {size_of(pruning.nbytes)}" if steps else ""))


def _report(pruning: Pruning) -> Iterator[RenderableType]:
    table = table_of("step", "stays", numbers=("step",))
    for step, why in sorted({**pruning.kept, **pruning.left}.items(), reverse=True):
        table.add_row(str(step), text_of(why))
    yield table
    yield text_of(f"{'would remove' if pruning.dry_run else 'removed'} {_what(pruning)}", "bold")
