"""`hpdcp diff`: whether two checkpoints hold the same."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from hpdcp._base import progress
from hpdcp.commands.options import AsJson, Bar, ShowBar, backend_option, storage_options_option
from hpdcp.commands.output import leave_to_rank_0, print_json, show
from hpdcp.commands.run_options import located

A = Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or Hugging Face weights.", show_default=False)]
B = Annotated[str, typer.Argument(metavar="B", help="The other one.", show_default=False)]
Values = Annotated[bool, typer.Option("--values", help="Compare values too, bit for bit.")]
Rtol = Annotated[
    float, typer.Option("--rtol", metavar="X", min=0, help="Let numbers differ by atol + rtol * |b|; see --atol.")
]
Atol = Annotated[float, typer.Option("--atol", metavar="X", min=0, help="See --rtol; either implies --values.")]
TrustChecksums = Annotated[
    bool,
    typer.Option(
        "--trust-checksums", help="Do not read what has equal recorded checksums on both sides. Implies --values."
    ),
]
CountLayout = Annotated[bool, typer.Option("--layout", help="Count how things are stored too: boxes, ties, nesting.")]
IgnoreDtype = Annotated[
    bool,
    typer.Option(
        "--ignore-dtype",
        help="Let dtypes differ and compare the numbers; after a cast, give --rtol too. Implies --values.",
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--keys", metavar="PATTERN", help="Compare only names that match; may be repeated."),
]
PrefixA = Annotated[str, typer.Option("--prefix-a", help="Compare only names of A that begin so, without it.")]
PrefixB = Annotated[str, typer.Option("--prefix-b", help="Compare only names of B that begin so, without it.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=0, help="Show at most N rows.")]
BackendA = Annotated[str | None, backend_option("--backend-a", "A's backend")]
BackendB = Annotated[str | None, backend_option("--backend-b", "B's backend")]
OptionsA = Annotated[dict[str, Any] | None, storage_options_option("--storage-options-a", "A")]
OptionsB = Annotated[dict[str, Any] | None, storage_options_option("--storage-options-b", "B")]


def diff(
    a: A,
    b: B,
    values: Values = False,
    rtol: Rtol = 0.0,
    atol: Atol = 0.0,
    trust_checksums: TrustChecksums = False,
    layout: CountLayout = False,
    ignore_dtype: IgnoreDtype = False,
    keys: Keys = None,
    prefix_a: PrefixA = "",
    prefix_b: PrefixB = "",
    limit: Limit = None,
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
    from hpdcp._files.reader import FileSystemReader
    from hpdcp._manage.compare import compare_checkpoints
    from hpdcp.commands.difference_report import as_document, report

    with ExitStack() as opened:

        @functools.cache
        def shown() -> progress.Bar:
            # Once there is something to show: often nothing is read.
            return opened.enter_context(progress.bar("diff", when=bar.value))

        found = compare_checkpoints(
            located(a, backend_a, storage_options_a),
            located(b, backend_b, storage_options_b),
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
        print_json(as_document(found))
    else:
        show(*report(found, limit))
    raise typer.Exit(0 if found.is_equal else 1)
