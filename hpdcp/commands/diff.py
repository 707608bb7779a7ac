"""`hpdcp diff`: whether two checkpoints hold the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from hpdcp._base import progress
from hpdcp._files.reader import FileSystemReader
from hpdcp._manage.compare import Aspect, Comparison, Difference, ValueDifference, compare_checkpoints
from hpdcp.commands.options import (
    AsJson,
    BackendA,
    BackendB,
    Bar,
    OptionsA,
    OptionsB,
    ShowBar,
)
from hpdcp.commands.output import (
    count_of,
    cut_off,
    leave_to_rank_0,
    print_json,
    rate_of,
    show,
    size_of,
    summary,
    table_of,
    text_of,
)

_ARRANGED = {
    Aspect.LAYOUT: "stored in other boxes",
    Aspect.TIES: "tied on one side only",
    Aspect.NESTING: "nested in another way",
    Aspect.DTYPE: "of another dtype",
}
_WHY = ("which does not count without --layout", "which does not count with --ignore-dtype")


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or Hugging Face weights.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.", show_default=False)],
    values: Annotated[bool, typer.Option("--values", help="Compare values too, bit for bit.")] = False,
    rtol: Annotated[
        float, typer.Option("--rtol", metavar="X", min=0, help="Let numbers differ by atol + rtol * |b|; see --atol.")
    ] = 0.0,
    atol: Annotated[
        float, typer.Option("--atol", metavar="X", min=0, help="See --rtol; either implies --values.")
    ] = 0.0,
    trust_checksums: Annotated[
        bool,
        typer.Option(
            "--trust-checksums", help="Do not read what has equal recorded checksums on both sides. Implies --values."
        ),
    ] = False,
    layout: Annotated[
        bool, typer.Option("--layout", help="Count how things are stored too: boxes, ties, nesting.")
    ] = False,
    ignore_dtype: Annotated[
        bool,
        typer.Option(
            "--ignore-dtype",
            help="Let dtypes differ and compare the numbers; after a cast, give --rtol too. Implies --values.",
        ),
    ] = False,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", metavar="PATTERN", help="Compare only names that match; may be repeated."),
    ] = None,
    prefix_a: Annotated[
        str, typer.Option("--prefix-a", help="Compare only names of A that begin so, without it.")
    ] = "",
    prefix_b: Annotated[
        str, typer.Option("--prefix-b", help="Compare only names of B that begin so, without it.")
    ] = "",
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=0, help="Show at most N rows.")] = None,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    backend_a: BackendA = None,
    backend_b: BackendB = None,
    storage_options_a: OptionsA = None,
    storage_options_b: OptionsB = None,
) -> None:
    """Compare two checkpoints, however each is sharded. Exit status 1 when they differ."""
    leave_to_rank_0()
    progress.check(bar.value)
    with ExitStack() as opened:

        @functools.cache
        def shown() -> progress.Bar:
            # Once there is something to show: often nothing is read.
            return opened.enter_context(progress.bar("diff", when=bar.value))

        found = compare_checkpoints(
            a,
            b,
            values=values,
            rtol=rtol,
            atol=atol,
            trust_checksums=trust_checksums,
            layout=layout,
            ignore_dtype=ignore_dtype,
            keys=keys or (),
            prefix_a=prefix_a,
            prefix_b=prefix_b,
            reader_a=FileSystemReader(backend=backend_a, storage_options=storage_options_a),
            reader_b=FileSystemReader(backend=backend_b, storage_options=storage_options_b),
            on_progress=lambda done, total: shown().reach(done, total),
        )
    if as_json:
        print_json(_as_document(found))
    else:
        show(*_report(found, limit))
    raise typer.Exit(0 if found.is_equal else 1)


def _as_document(found: Comparison) -> dict[str, Any]:
    document = asdict(found)
    for each in [*document["differences"], *document["arrangement"]]:
        each["aspect"] = each["aspect"].name.lower()
        for key, value in (each["elements"] or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                each["elements"][key] = str(value)  # JSON has no word for it
    return {**document, "is_equal": found.is_equal}


def _report(found: Comparison, limit: int | None) -> Iterator[RenderableType]:
    yield text_of(f"A: {found.url_a}")
    yield text_of(f"B: {found.url_b}")
    yield Text()
    table = table_of("name", "differs in", "A", "B", "how")
    told = {(each.fqn, each.owner) for each in found.differences if each.aspect in (Aspect.VALUES, Aspect.SHAPE)}
    for each in found.differences[:limit]:
        how = _how(each.elements)
        if each.aspect is Aspect.DTYPE:
            how = _how_dtypes(found, has_a_row=(each.fqn, each.owner) in told)
        table.add_row(text_of(_name(each)), each.aspect.value, text_of(each.a), text_of(each.b), text_of(how))
    yield from cut_off(table, len(found.differences))
    for aspect, count in _counted(found.arrangement).items():
        yield text_of(f"{count_of(count, 'name')} {_ARRANGED[aspect]}, {_WHY[aspect is Aspect.DTYPE]}", "dim")
    compared = count_of(found.names, "name")
    if found.nbytes:
        compared += f", {size_of(found.nbytes)} of values in {rate_of(found.nbytes, found.seconds)}"
    if found.trusted_nbytes:
        compared += f", {size_of(found.trusted_nbytes)} by their checksums alone"
    hint = _prefix_hint(found)
    if hint:
        yield text_of(hint)
    if found.is_equal:
        what = "equal" if found.values else "alike (values were not compared: --values)"
        yield text_of(f"{what}: {compared}", "bold green")
    else:
        names = len({(each.fqn, each.owner) for each in found.differences})
        yield text_of(f"DIFFERENT: {count_of(names, 'name')}; compared were {compared}", "bold red")


def _name(difference: Difference) -> str:
    return difference.fqn + ("" if difference.owner is None else f" of rank {difference.owner}")


def _how_dtypes(found: Comparison, *, has_a_row: bool) -> str:
    if not found.across_dtypes:
        return "values not compared: --ignore-dtype"
    return "" if has_a_row else "values are the same, or within the tolerance"


def _how(elements: ValueDifference | None) -> str:
    if elements is None:
        return ""
    share = f"{elements.differing:,} of {elements.elements:,}, first [{', '.join(map(str, elements.first))}]"
    if elements.max_abs is not None:
        share += f", by up to {elements.max_abs:.3g}" if elements.max_abs else ", in bits alone"
    if elements.max_rel:
        share += f" ({elements.max_rel:.2g} of b)"
    return share + (f", {elements.one_nan:,} NaN on one side" if elements.one_nan else "")


def _prefix_hint(found: Comparison) -> str:
    """What to try where no name is common since all have one more word in front on one side; else empty."""
    if found.names:
        return ""
    sides = [
        [each.fqn for each in found.differences if each.aspect is aspect]
        for aspect in (Aspect.ONLY_IN_A, Aspect.ONLY_IN_B)
    ]
    for (longer, shorter), flag in zip((sides, sides[::-1]), ("a", "b"), strict=True):
        for name in (name for name in longer if shorter and name.endswith(f".{shorter[0]}")):
            prefix = name.removesuffix(shorter[0])
            if {prefix + short for short in shorter} <= set(longer):
                return (
                    f"Every name of one side is one of the other with {prefix!r} in front: try --prefix-{flag} {prefix}"
                )
    return ""


def _counted(differences: Sequence[Difference]) -> dict[Aspect, int]:
    counts = summary(each.aspect.name for each in differences)
    return {Aspect[name]: count for name, count in counts.items()}
