"""`hpdcp verify`: whether a checkpoint's bytes are those that were saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import typer
from rich.console import RenderableType
from rich.text import Text

from hpdcp._base import progress
from hpdcp._files.reader import FileSystemReader
from hpdcp._manage.verify import VerifyReport, verify_checkpoint
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


def verify(
    url: Url,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    backend: BackendName = None,
    storage_options: StorageOptions = None,
) -> None:
    """Read every byte of a checkpoint and compare every checksum. Exit status 1 when something is damaged."""
    leave_to_rank_0()
    reader = FileSystemReader(backend=backend, storage_options=storage_options)
    with progress.bar("verify", when=bar.value) as shown:
        report = verify_checkpoint(url, reader=reader, on_progress=shown.reach)
    if as_json:
        print_json({**asdict(report), "is_sound": report.is_sound})
    else:
        show(*_verdict(report))
    raise typer.Exit(0 if report.is_sound else 1)


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
