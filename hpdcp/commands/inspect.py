"""`hpdcp inspect`: what a checkpoint holds, as tables, as a tree, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from hpdcp._files.foreign import TORCH_ORIGIN
from hpdcp._format.columns import EntryKind
from hpdcp._manage.inspect import CheckpointReport, EntryReport, inspect_checkpoint
from hpdcp.commands.options import AsJson, BackendName, StorageOptions, Url
from hpdcp.commands.output import (
    count_of,
    cut_off,
    in_order,
    leave_to_rank_0,
    note,
    print_json,
    shape_of,
    show,
    size_of,
    table_of,
    text_of,
)
from hpdcp.commands.run_options import located


def inspect(
    url: Url,
    tree: Annotated[bool, typer.Option("--tree", help="Show names as a tree, with the bytes of each branch.")] = False,
    as_json: AsJson = False,
    pattern: Annotated[
        str | None, typer.Option("--filter", metavar="GLOB", help="Show only names that match, as in 'model.*.weight'.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=0, help="Show at most N rows of each table.")
    ] = None,
    backend: BackendName = None,
    storage_options: StorageOptions = None,
) -> None:
    """Show what a checkpoint holds: tensors, Python values, files. Reads its metadata and runs nothing of it."""
    leave_to_rank_0()
    if tree and as_json:
        raise typer.BadParameter("--tree and --json exclude each other.")
    url = located(url, backend, storage_options)
    report = inspect_checkpoint(url, pattern=pattern, backend=backend, storage_options=storage_options)
    if pattern is not None and not report.entries:
        note(f"no name matches --filter {pattern!r}; without it, all are shown.")
    if as_json:
        print_json(_as_document(report))
    elif tree:
        show(_headline(report), _tree(report), _totals(report))
    else:
        show(_headline(report))
        for part in _tables(report, limit):
            show(part)  # as soon as it is made: there may be a hundred thousand rows
        show(_totals(report))


def _by_name(entries: Iterable[EntryReport]) -> list[EntryReport]:
    return in_order(entries, lambda entry: entry.fqn)


def _headline(report: CheckpointReport) -> Group:
    if report.origin:
        facts = [f"weights from {report.origin}", f"layout {report.layout}", "no checksums"]
        if report.origin == TORCH_ORIGIN:
            facts = ["saved by torch.distributed.checkpoint", f"layout {report.layout}"]
        return Group(text_of(report.url, "bold"), text_of(" · ".join(facts)), Text())
    how = "each for itself" if report.by_rank else "together"
    ranks = f"{count_of(report.world_size, 'rank')}{f', {how}' if report.world_size > 1 or report.by_rank else ''}"
    facts = [f"saved by {ranks}", f"attempt {report.attempt}", f"layout {report.layout}", f"format {report.version}"]
    if report.run:
        facts.insert(1, f"run {report.run}")
    return Group(text_of(report.url, "bold"), text_of(" · ".join(facts)), Text())


def _totals(report: CheckpointReport) -> Group:
    entries = [
        count_of(len(report.tensors), "tensor"),
        count_of(len(report.values), "Python value"),
        count_of(len({entry.fqn for entry in report.per_rank}), "name") + " per rank",
        count_of(len(report.aliases), "tied name"),
    ]
    stored = f"{size_of(report.nbytes)} in {count_of(sum(entry.chunks for entry in report.entries), 'chunk')}"
    files = f"{count_of(len(report.files), 'file')} of {size_of(report.file_bytes)}"
    if report.metadata_bytes:  # weights in one file have none but its header
        files += f", metadata of {size_of(report.metadata_bytes)}"
    return Group(text_of(f"{', '.join(entries)}: {stored}"), text_of(files))


def _tables(report: CheckpointReport, limit: int | None) -> Iterable[RenderableType]:
    numbers = ("chunks", "files", "bytes")
    tensors = table_of("tensor", "dtype", "shape", *numbers, numbers=numbers)
    for entry in _by_name(report.tensors)[:limit]:
        tensors.add_row(
            text_of(entry.fqn), entry.dtype, shape_of(entry.shape),
            str(entry.chunks), str(len(entry.files)), size_of(entry.nbytes),
        )  # fmt: skip
    yield from cut_off(tensors, len(report.tensors), "tensor")

    values = table_of("Python value", "bytes", numbers=numbers)
    for entry in _by_name(report.values)[:limit]:
        values.add_row(text_of(entry.fqn), size_of(entry.nbytes))
    yield from cut_off(values, len(report.values), "Python value")

    owned: dict[str, list[EntryReport]] = {}
    for entry in _by_name(report.per_rank):
        owned.setdefault(entry.fqn, []).append(entry)
    per_rank = table_of("per rank", "ranks", "kind", "shape", "bytes", numbers=numbers)
    for fqn, entries in list(owned.items())[:limit]:
        kinds = {entry.dtype or "Python value" for entry in entries}
        shapes = {shape_of(entry.shape) if entry.kind is EntryKind.TENSOR else "" for entry in entries}
        per_rank.add_row(
            text_of(fqn), _ranks([entry.owner or 0 for entry in entries]), ", ".join(sorted(kinds)),
            shapes.pop() if len(shapes) == 1 else "differ", size_of(sum(entry.nbytes for entry in entries)),
        )  # fmt: skip
    yield from cut_off(per_rank, len(owned), "per-rank name")

    aliases = table_of("tied name", "stored as")
    for entry in _by_name(report.aliases)[:limit]:
        aliases.add_row(text_of(entry.fqn), text_of(entry.alias_of))
    yield from cut_off(aliases, len(report.aliases), "tied name")


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
        line = Text.assemble(
            text_of(label), "  ", (f"{what}  " if what else "", "cyan"), (size_of(branch.nbytes), "dim")
        )
        node = tree.add(line)
        for step, inner in branch.below.items():
            inner.grow(step, node)


def _described(entry: EntryReport) -> str:
    if entry.kind is EntryKind.ALIAS:
        return text_of(f"tied to {entry.alias_of}").plain
    kind = "Python value" if entry.kind is EntryKind.OBJECT else f"{entry.dtype} {shape_of(entry.shape)}"
    return kind if entry.owner is None else f"{kind} per rank"


def _tree(report: CheckpointReport) -> Tree:
    root = _Branch()
    for entry in _by_name(report.entries):
        branch = root
        branch.nbytes += entry.nbytes
        for step in entry.fqn.split("."):
            branch = branch.below.setdefault(step, _Branch())
            branch.nbytes += entry.nbytes
        branch.entries.append(entry)
    tree = Tree(text_of(size_of(root.nbytes)), hide_root=True)
    for step, branch in root.below.items():
        branch.grow(step, tree)
    return tree


def _as_document(report: CheckpointReport) -> Mapping[str, object]:
    document = asdict(report)
    for entry in document["entries"]:
        entry["kind"] = EntryKind(entry["kind"]).name.lower()
    return {**document, "nbytes": report.nbytes, "file_bytes": report.file_bytes}
