"""Rows that are printed at once, against the tables of rich that print one by one."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpdcp.commands.output import table_of, text_of

_CELL = st.text(st.sampled_from("ab.0ü漢 "), max_size=12)


def _printed(rows: Sequence[Sequence[str | Text]], width: int, *, by_rich: bool) -> str:
    table = table_of("name", "bytes", "stored as", numbers=("bytes",))
    for row in rows:
        table.add_row(*row)
    if by_rich:
        table.__class__ = Table
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(table)
    return out.getvalue()


@given(st.lists(st.tuples(_CELL.map(text_of), st.integers(0, 10**9).map(str), _CELL.map(text_of)), max_size=5))
def test_rows_look_as_rich_prints_them(rows: list[tuple[Text, str, Text]]) -> None:
    for width in (30, 60, 100_000):
        assert _printed(rows, width, by_rich=False) == _printed(rows, width, by_rich=True)


@pytest.mark.parametrize("cell", [text_of("red", "red"), Text("two\nlines")])
def test_what_has_a_style_or_several_lines_is_left_to_rich(cell: Text) -> None:
    rows = [(text_of("a"), "1", cell)]
    assert _printed(rows, 80, by_rich=False) == _printed(rows, 80, by_rich=True)


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    assert "[bold]x[/bold]" in _printed([("[bold]x[/bold]", "1", "y")], 80, by_rich=False)
