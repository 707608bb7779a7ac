"""`hpdcp rm`: remove a checkpoint and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import RenderableType

from hpdcp._base.errors import InvalidArgumentError
from hpdcp.commands.options import AsJson, BackendName, DryRun, StorageOptions, Url
from hpdcp.commands.output import count_of, leave_to_rank_0, note, plain, print_json, show, size_of, text_of

if TYPE_CHECKING:
    from hpdcp._manage.remove import Removal

_MOST_NAMED: Final = 10


def rm(
    url: Url,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Remove even with damaged metadata, or where a save may be in progress, which then publishes nothing.",
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    backend: BackendName = None,
    storage_options: StorageOptions = None,
) -> None:
    """Remove a checkpoint, or what a save that did not finish left. Every other file in the folder stays.

    Asks first, unless --yes is given.
    """
    leave_to_rank_0()
    if not (yes or dry_run or sys.stdin.isatty()):
        # No error of usage: what would be printed of that goes before the one sentence that helps.
        raise InvalidArgumentError("there is no terminal to ask on: give --yes to remove it, or --dry-run to look.")
    from hpdcp._manage.remove import remove_checkpoint
    from hpdcp._manage.run_steps import locate_step

    confirmed = True

    def confirm(planned: Removal) -> bool:
        nonlocal confirmed
        confirmed = typer.confirm(f"Remove {_what(planned)}?", err=True)
        return confirmed

    removal = remove_checkpoint(
        locate_step(url, to_remove=True, backend=backend, storage_options=storage_options),
        backend=backend,
        storage_options=storage_options,
        force=force,
        dry_run=dry_run,
        confirm=None if yes or dry_run else confirm,
    )
    if as_json:
        print_json({**asdict(removal), "claim": removal.lease, "keys": removal.keys})
    elif confirmed:
        show(*_report(removal))
    if not confirmed:
        note("nothing was removed.")
        raise typer.Exit(1)


def _what(removal: Removal) -> str:
    kind = "the checkpoint" if removal.metadata else "what a save that did not finish left"
    what = f"{kind} in {removal.url}: {count_of(len(removal.keys), 'file')}, {size_of(removal.nbytes)}"
    return plain(what + (f"; {count_of(len(removal.foreign), 'other file', 'stay')}" if removal.foreign else ""))


def _report(removal: Removal) -> Iterator[RenderableType]:
    if removal.dry_run:
        yield text_of(f"would remove {_what(removal)}:", "bold")
        yield from (text_of(f"  {key}") for key in removal.keys)
    else:
        yield text_of(
            f"removed {count_of(len(removal.keys), 'file')}, {size_of(removal.nbytes)}"
            f"{', and the folder' if removal.folder_removed else ''}: {removal.url}"
        )
    if removal.foreign:
        yield text_of(f"{count_of(len(removal.foreign), 'other file', 'stay')}:")
        yield from (text_of(f"  {key}") for key in removal.foreign[:_MOST_NAMED])
        if len(removal.foreign) > _MOST_NAMED:
            yield text_of(f"  … and {len(removal.foreign) - _MOST_NAMED:,} more", "dim")
