"""How commands print: tables and text for people, JSON for programs, and nothing but on rank 0."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from hpdcp._base.natural_order import natural_key
from hpdcp.commands.launched import rank

_WIDE: Final = 100_000
"""Columns of output that goes to a file or a pipe: names are never cut there."""

Thing = TypeVar("Thing")


def leave_to_rank_0() -> None:
    """End this process, well, unless it is rank 0: what the command does is no work to share."""
    if rank():
        typer.echo(f"hpdcp: process {rank()} of torchrun's leaves it to process 0.", err=True)
        raise typer.Exit(0)


def show(*parts: RenderableType) -> None:
    """Print for people, on stdout."""
    if rank():
        return
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    for part in parts:
        console.print(part)


def print_json(document: object) -> None:
    """Print one document for programs, on stdout."""
    if not rank():
        typer.echo(json.dumps(document, indent=2))


def note(message: str) -> None:
    """Say on stderr what is none of the result."""
    if not rank():
        typer.echo(f"hpdcp: {plain(message)}", err=True)


def plain(text: str) -> str:
    """Never a control sequence: names come from files that a stranger may have written.

    >>> print(plain("a" + chr(27) + "[31m"))
    a\\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def text_of(text: str, style: str = "") -> Text:
    """As `plain`, and never markup."""
    return Text(plain(text), style=style)


def size_of(nbytes: int) -> str:
    """A number of bytes for people.

    >>> size_of(0), size_of(1536), size_of(5 << 30)
    ('0 B', '1.5 KiB', '5.0 GiB')
    """
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def count_of(number: int, thing: str, verb: str = "") -> str:
    """A number of things, and what they do.

    >>> count_of(1, "file"), count_of(2000, "file"), count_of(1, "file", "stay"), count_of(2, "file", "stay")
    ('1 file', '2,000 files', '1 file stays', '2 files stay')
    """
    one = number == 1
    does = f" {verb}{'s' if one else ''}" if verb else ""
    return f"{number:,} {thing}{'' if one else 's'}{does}"


def rate_of(nbytes: int, seconds: float) -> str:
    """How long it took, and how fast that is."""
    return f"{seconds:.2f} s ({size_of(round(nbytes / max(seconds, 1e-9)))}/s)"


def shape_of(shape: Sequence[int]) -> str:
    """A shape, as torch writes it."""
    return f"[{', '.join(map(str, shape))}]"


def in_order(things: Iterable[Thing], name: Callable[[Thing], str]) -> list[Thing]:
    """By name, as people count: layer 2 before layer 10."""
    return sorted(things, key=lambda thing: natural_key(name(thing)))


class Rows(Table):
    """A table that prints plain rows at once: rich takes a millisecond for each, and a model has 100,000.

    Where rows do not fit the width or have styles, it prints as any table of rich does.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [_plain_cells(column) for column in self.columns]
        plain_columns = [cells for cells in columns if cells is not None]
        widths = [max(map(_width, cells)) for cells in plain_columns]
        gap = "   "
        if len(plain_columns) < len(columns) or sum(widths) + len(gap) * (len(widths) - 1) > options.max_width:
            yield from super().__rich_console__(console, options)
            return
        adjusted = [
            [_adjusted(cell, width, right=column.justify == "right") for cell in cells]
            for column, cells, width in zip(self.columns, plain_columns, widths, strict=True)
        ]
        header, *rows = map(gap.join, zip(*adjusted, strict=True))
        yield Segment(header, Style(bold=True))
        yield Segment("\n" + "─" * _width(header) + "\n")
        yield Segment("".join(f"{row}\n" for row in rows))


def _plain_cells(column: Column) -> list[str] | None:
    """The header and the cells of a column as one line each; None where rich has to lay one out."""
    cells: list[str] = []
    for cell in (column.header, *column.cells):
        if isinstance(cell, Text) and not cell.style and not cell.spans:
            cells.append(cell.plain)
        elif isinstance(cell, str):
            cells.append(plain(cell))
        else:
            return None
    return None if any("\n" in cell for cell in cells) else cells


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _adjusted(text: str, width: int, *, right: bool) -> str:
    spaces = " " * (width - _width(text))
    return spaces + text if right else text + spaces


def table_of(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table; `numbers` are the columns that end at the right."""
    table = Rows(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        if column in numbers:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def cut_off(table: Table, total: int, thing: str) -> Iterator[RenderableType]:
    """The table, how many of `total` things were left out, and an empty line; nothing where there is nothing."""
    if total:
        if table.row_count:
            yield table
        if table.row_count < total:
            left_out = count_of(total - table.row_count, f"more {thing}" if table.row_count else thing)
            yield text_of(f"… and {left_out}" if table.row_count else f"… {left_out}", "dim")
        yield Text()


def summary(reasons: Iterable[Any]) -> dict[str, int]:
    """How often each occurs, the most frequent first."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[str(reason)] = counts.get(str(reason), 0) + 1
    return dict(sorted(counts.items(), key=lambda pair: -pair[1]))
