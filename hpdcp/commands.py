"""What the command line does: looks into checkpoints, verifies them, and shows the configuration.

Results go to stdout, as tables or, with `--json`, as one JSON document; everything else goes to stderr.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Final

import typer
from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hpdcp import config
from hpdcp.filesystem_storage import FileSystemReader
from hpdcp.inspect import CheckpointReport, EntryReport, inspect_checkpoint
from hpdcp.tables import EntryKind
from hpdcp.verify import VerifyReport, verify_checkpoint

_WIDE: Final = 100_000
"""Columns of output that goes to a file or a pipe: names are never cut there."""

_NUMBER: Final = re.compile(r"([0-9]{1,18})")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Look into checkpoints of hpdcp, and verify them.",
)
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The configuration in effect.")
app.add_typer(config_app, name="config")

Url = Annotated[str, typer.Argument(metavar="URL", help="The checkpoint's folder or URL.", show_default=False)]
BackendName = Annotated[
    str | None, typer.Option("--backend", metavar="NAME", help="In place of the configured one: local, s3, fsspec, …")
]


def _read_options(text: str) -> dict[str, object]:
    """Storage options as they are given on a command line: JSON, or `@` and a file of it. Values may be secrets."""
    where = "the text"
    if text.startswith("@"):
        where = text[1:]
        try:
            text = Path(where).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{where!r} cannot be read: {error}. Expected a file of JSON.") from None
    example = """{"anon": true}"""
    try:
        options = json.loads(text)
    except ValueError as error:
        reason = str(error)
        raise typer.BadParameter(f"{where} is not JSON ({reason}): expected an object, such as '{example}'.") from None
    if not isinstance(options, dict):
        kind = type(options).__name__
        raise typer.BadParameter(f"{where} is JSON, but a {kind}: expected an object, such as '{example}'.")
    return options


StorageOptions = Annotated[
    dict[str, object] | None,
    typer.Option(
        "--storage-options",
        metavar="JSON|@FILE",
        parser=_read_options,
        help="fsspec's options for the place, over the configured ones. Secrets are safer in @FILE or the environment.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of tables; sizes in bytes.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpdcp {installed_version('hpdcp')}")
        raise typer.Exit


@app.callback()
def hpdcp(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Look into checkpoints of hpdcp, and verify them."""


@app.command()
def inspect(
    url: Url,
    tree: Annotated[bool, typer.Option("--tree", help="Names as a tree, with the bytes of each branch.")] = False,
    as_json: AsJson = False,
    pattern: Annotated[
        str | None, typer.Option("--filter", metavar="GLOB", help="Only names that match, as in 'model.*.weight'.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=0, help="At most N rows of each table.")
    ] = None,
    backend: BackendName = None,
    storage_options: StorageOptions = None,
) -> None:
    """Show what a checkpoint holds: tensors, Python values, files. Reads its metadata and runs nothing of it."""
    if tree and as_json:
        raise typer.BadParameter("--tree and --json exclude each other.")
    reader = FileSystemReader(backend=backend, storage_options=storage_options)
    report = inspect_checkpoint(url, pattern=pattern, reader=reader)
    if as_json:
        _print_json(_as_document(report))
    elif tree:
        _console().print(Group(_headline(report), _tree(report), _totals(report)))
    else:
        _console().print(Group(_headline(report), *_tables(report, limit), _totals(report)))


@app.command()
def verify(
    url: Url, as_json: AsJson = False, backend: BackendName = None, storage_options: StorageOptions = None
) -> None:
    """Read every byte of a checkpoint and compare every checksum. Exit status 1 when something is damaged."""
    reader = FileSystemReader(backend=backend, storage_options=storage_options)
    with Progress(
        BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        console=Console(stderr=True), transient=True, disable=as_json or not sys.stderr.isatty(),
    ) as progress:  # fmt: skip
        task = progress.add_task("verify", total=None)
        report = verify_checkpoint(
            url, reader=reader, on_progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        _print_json({**asdict(report), "is_sound": report.is_sound})
    else:
        _console().print(Group(*_verdict(report)))
    raise typer.Exit(0 if report.is_sound else 1)


@config_app.command()
def show(as_json: AsJson = False) -> None:
    """Show every key of the configuration, its value and where that comes from. Secrets are masked."""
    settings = config.effective()
    if as_json:
        _print_json([{"key": s.key, "value": s.shown, "origin": s.origin} for s in settings])
        return
    table = _table("key", "value", "from")
    for setting in settings:
        table.add_row(_text(setting.key), _text(setting.shown), _text(setting.origin))
    _console().print(table)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


def _print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=2))


def _text(text: str, style: str = "") -> Text:
    """Never markup, and never a control sequence: names come from files that a stranger may have written."""
    return Text("".join(char if char.isprintable() else ascii(char)[1:-1] for char in text), style=style)


def _size(nbytes: int) -> str:
    """A number of bytes for people.

    >>> _size(0), _size(1536), _size(5 << 30)
    ('0 B', '1.5 KiB', '5.0 GiB')
    """
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _in_order(entries: Iterable[EntryReport]) -> list[EntryReport]:
    """By name, as people count: layer 2 before layer 10."""

    def key(entry: EntryReport) -> list[tuple[int, str]]:
        # Odd parts are the numbers; as pairs, so that a number meets a number at the same place of two names.
        parts = _NUMBER.split(entry.fqn)
        return [(int(part), part) if place % 2 else (0, part) for place, part in enumerate(parts)]

    return sorted(entries, key=key)


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        if column in numbers:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def _headline(report: CheckpointReport) -> Group:
    if report.origin:
        facts = [f"weights from {report.origin}", f"layout {report.layout}", "no checksums"]
        return Group(_text(report.url, "bold"), _text(" · ".join(facts)), Text())
    how = "each for itself" if report.by_rank else "together"
    ranks = f"{_count(report.world_size, 'rank')}{f', {how}' if report.world_size > 1 or report.by_rank else ''}"
    facts = [f"saved by {ranks}", f"attempt {report.attempt}", f"layout {report.layout}", f"format {report.version}"]
    if report.run:
        facts.insert(1, f"run {report.run}")
    return Group(_text(report.url, "bold"), _text(" · ".join(facts)), Text())


def _totals(report: CheckpointReport) -> Group:
    entries = [
        _count(len(report.tensors), "tensor"),
        _count(len(report.values), "Python value"),
        _count(len({entry.fqn for entry in report.per_rank}), "name") + " per rank",
        _count(len(report.aliases), "tied name"),
    ]
    stored = f"{_size(report.nbytes)} in {_count(sum(entry.chunks for entry in report.entries), 'chunk')}"
    files = (
        f"{_count(len(report.files), 'file')} of {_size(report.file_bytes)}, metadata of {_size(report.metadata_bytes)}"
    )
    return Group(_text(f"{', '.join(entries)}: {stored}"), _text(files))


def _tables(report: CheckpointReport, limit: int | None) -> Iterable[Table | Text]:
    numbers = ("chunks", "files", "bytes")
    tensors = _table("tensor", "dtype", "shape", *numbers, numbers=numbers)
    for entry in _in_order(report.tensors)[:limit]:
        tensors.add_row(
            _text(entry.fqn), entry.dtype, _shape(entry.shape),
            str(entry.chunks), str(len(entry.files)), _size(entry.nbytes),
        )  # fmt: skip
    yield from _shown(tensors, len(report.tensors))

    values = _table("Python value", "bytes", numbers=numbers)
    for entry in _in_order(report.values)[:limit]:
        values.add_row(_text(entry.fqn), _size(entry.nbytes))
    yield from _shown(values, len(report.values))

    owned: dict[str, list[EntryReport]] = {}
    for entry in _in_order(report.per_rank):
        owned.setdefault(entry.fqn, []).append(entry)
    per_rank = _table("per rank", "ranks", "kind", "shape", "bytes", numbers=numbers)
    for fqn, entries in list(owned.items())[:limit]:
        kinds = {entry.dtype or "Python value" for entry in entries}
        shapes = {_shape(entry.shape) if entry.kind is EntryKind.TENSOR else "" for entry in entries}
        per_rank.add_row(
            _text(fqn), _ranks([entry.owner or 0 for entry in entries]), ", ".join(sorted(kinds)),
            shapes.pop() if len(shapes) == 1 else "differ", _size(sum(entry.nbytes for entry in entries)),
        )  # fmt: skip
    yield from _shown(per_rank, len(owned))

    aliases = _table("tied name", "stored as")
    for entry in _in_order(report.aliases)[:limit]:
        aliases.add_row(_text(entry.fqn), _text(entry.alias_of))
    yield from _shown(aliases, len(report.aliases))


def _shown(table: Table, total: int) -> Iterable[Table | Text]:
    """The table, how much of it was left out, and an empty line; nothing where there is nothing."""
    if total:
        if table.row_count:
            yield table
        if table.row_count < total:
            more = "and " * bool(table.row_count) + f"{total - table.row_count:,} more"
            yield _text(f"… {more} in the column {table.columns[0].header!r}", "dim")
        yield Text()


def _ranks(owners: Sequence[int]) -> str:
    """The ranks, with stretches as such.

    >>> _ranks([0, 1, 2, 5])
    '0-2, 5'
    """
    stretches: list[list[int]] = []
    for rank in sorted(owners):
        if stretches and rank == stretches[-1][1] + 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in stretches)


@dataclass(slots=True)
class _Branch:
    """One component of the names, and what is stored at and below it."""

    nbytes: int = 0
    entries: list[EntryReport] = field(default_factory=list)
    below: dict[str, _Branch] = field(default_factory=dict)

    def grow(self, name: str, tree: Tree) -> None:
        """Add this branch, and all below it, to `tree`; a branch that only leads to another shares its line."""
        label, branch = name, self
        while len(branch.below) == 1 and not branch.entries:
            ((step, branch),) = branch.below.items()
            label = f"{label}.{step}"
        what = ", ".join(dict.fromkeys(_described(entry) for entry in branch.entries))
        line = Text.assemble(_text(label), "  ", (f"{what}  " if what else "", "cyan"), (_size(branch.nbytes), "dim"))
        node = tree.add(line)
        for step, inner in branch.below.items():
            inner.grow(step, node)


def _described(entry: EntryReport) -> str:
    if entry.kind is EntryKind.ALIAS:
        return _text(f"tied to {entry.alias_of}").plain
    kind = "Python value" if entry.kind is EntryKind.OBJECT else f"{entry.dtype} {_shape(entry.shape)}"
    return kind if entry.owner is None else f"{kind} per rank"


def _tree(report: CheckpointReport) -> Tree:
    root = _Branch()
    for entry in _in_order(report.entries):
        branch = root
        branch.nbytes += entry.nbytes
        for step in entry.fqn.split("."):
            branch = branch.below.setdefault(step, _Branch())
            branch.nbytes += entry.nbytes
        branch.entries.append(entry)
    tree = Tree(_text(_size(root.nbytes)), hide_root=True)
    for step, branch in root.below.items():
        branch.grow(step, tree)
    return tree


def _as_document(report: CheckpointReport) -> Mapping[str, object]:
    document = asdict(report)
    for entry in document["entries"]:
        entry["kind"] = EntryKind(entry["kind"]).name.lower()
    return {**document, "nbytes": report.nbytes, "file_bytes": report.file_bytes}


def _verdict(report: VerifyReport) -> Iterable[Table | Text]:
    rate = _size(round(report.nbytes / max(report.seconds, 1e-9)))
    compared = (
        f"{_count(report.files, 'file')}, {_size(report.nbytes)} in {_count(report.blocks, 'block')} compared in "
        f"{report.seconds:.2f} s ({rate}/s)"
    )
    if report.damages:
        numbers = ("offset", "bytes")
        table = _table("file", "problem", "of", *numbers, numbers=numbers)
        for damage in report.damages:
            table.add_row(
                _text(damage.key), _text(damage.problem), _text(damage.fqn),
                *("" if number is None else str(number) for number in (damage.offset, damage.length)),
            )  # fmt: skip
        yield table
        yield Text()
        yield _text(
            f"DAMAGED: {report.url}: {_count(len(report.damages), 'problem')}; intact are {compared}", "bold red"
        )
    else:
        yield _text(f"sound: {report.url}: {compared}", "bold green")
    if report.orphans:
        yield _text(f"{_count(len(report.orphans), 'file')} of saves that did not finish, not part of the checkpoint:")
        yield from (_text(f"  {key}") for key in report.orphans)
