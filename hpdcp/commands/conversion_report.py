"""What `hpdcp convert` prints of a conversion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from rich.console import RenderableType
from rich.text import Text

from hpdcp.commands.output import count_of, cut_off, rate_of, size_of, summary, table_of, text_of

if TYPE_CHECKING:
    from hpdcp._convert.conversion import Conversion

_MOST_FILES: Final = 20


def report(done: Conversion, seconds: float, kind: str) -> Iterator[RenderableType]:
    """Tables for people; `kind` is what was made: "checkpoint", "folder of weights", "file"."""
    if done.files:
        table = table_of("file", "bytes", numbers=("bytes",))
        for key, size in list(done.files.items())[:_MOST_FILES]:
            table.add_row(text_of(key), size_of(size))
        yield from cut_off(table, len(done.files), "file")
    yield from _left_out(done.skipped)
    if done.copied:
        yield text_of(f"copied along: {', '.join(done.copied)}")
    files = f" in {count_of(len(done.files), 'file')}" if done.files else ""
    what = f"{count_of(len(done.tensors), 'tensor')}, {size_of(done.nbytes)}{files}"
    verb = "would replace" if done.dry_run else "replaced"
    before = f"; {verb} the {kind} that was there" if done.replaced else ""
    if done.dry_run:
        yield text_of(f"would write a {kind}: {done.dst}: {what}{before}", "bold")
    else:
        yield text_of(f"wrote a {kind}: {done.dst}: {what}, in {rate_of(done.nbytes, seconds)}{before}", "bold")


def _left_out(skipped: Mapping[str, str]) -> Iterator[RenderableType]:
    if not skipped:
        return
    table = table_of("left out", "names", "such as", numbers=("names",))
    for reason, count in summary(skipped.values()).items():
        example = next(name for name, why in skipped.items() if why == reason)
        table.add_row(text_of(reason), f"{count:,}", text_of(example))
    yield table
    yield Text()
