"""Whether two checkpoints hold the same: the data behind `hpdcp diff`; prints nothing.

Names, shapes and dtypes are compared from the metadata alone. Values, where they are asked for, are streamed from both
sides in the row-major order of each tensor, a few blocks at a time, so that neither layout matters nor size. Either
side may be a checkpoint, of ranks that saved together or each for itself, or a folder of Hugging Face weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hpdcp._base.arguments import require_flags
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._base.natural_order import natural_key
from hpdcp._files.reader import FileSystemReader
from hpdcp._manage._compare_structure import common_rows, structure_differences
from hpdcp._manage._compare_values import Progress, ValueComparison
from hpdcp._manage._compared_checkpoint import ComparedCheckpoint
from hpdcp._manage._comparison import ARRANGEMENT, Aspect, Comparison, ComparisonOptions, Difference
from hpdcp._manage._value_differences import ValueDifference

__all__ = ["ARRANGEMENT", "Aspect", "Comparison", "Difference", "ValueDifference", "compare_checkpoints"]


def compare_checkpoints(
    a: str | Path,
    b: str | Path,
    *,
    values: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    trust_checksums: bool = False,
    layout: bool = False,
    ignore_dtype: bool = False,
    keys: Sequence[str] = (),
    prefix_a: str = "",
    prefix_b: str = "",
    reader_a: FileSystemReader | None = None,
    reader_b: FileSystemReader | None = None,
    on_progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints; neither is changed.

    Args:
        a, b: folders or URLs.
        values: compare values as well, bit for bit: a NaN equals itself, 0.0 and -0.0 differ.
        rtol, atol: let floating-point and complex numbers differ by up to `atol + rtol * |b|`, also where dtypes
            differ; NaN then equals NaN. Implies `values`.
        trust_checksums: take for equal, unread, what both sides stored in the same boxes with equal checksums: one
            that differs passes with a chance of 1 in 2**32 for each 4 MiB, and damage since the save goes unnoticed.
            Implies `values`.
        layout: how things are stored counts as well: boxes, ties, nesting.
        ignore_dtype: a dtype that differs does not count; numbers are compared as what they are, in a dtype that holds
            those of both sides. An export that was cast has lost digits: give a tolerance as well. Implies `values`.
        keys: only names that match one of these patterns, as a shell matches files, without the prefix.
        prefix_a, prefix_b: only names that begin so, without it: `"model."` to compare with Hugging Face weights.
        reader_a, reader_b: in place of the configured ones.
        on_progress: called with (bytes compared so far, bytes to compare), counted on side A.

    Raises:
        InvalidArgumentError: nothing is left to compare on either side.
        CorruptCheckpointError: a side is damaged; names the file.
        CheckpointError, StorageError: a side cannot be read.
    """
    require_flags(values=values, trust_checksums=trust_checksums, layout=layout, ignore_dtype=ignore_dtype)
    began = time.perf_counter()
    options = ComparisonOptions(
        values=values,
        rtol=rtol,
        atol=atol,
        trust_checksums=trust_checksums,
        layout=layout,
        ignore_dtype=ignore_dtype,
        keys=keys,
        prefix_a=prefix_a,
        prefix_b=prefix_b,
    )
    with ExitStack() as opened:
        side_a = ComparedCheckpoint.open(a, reader_a, options.prefix_a, options.keys, opened)
        side_b = ComparedCheckpoint.open(b, reader_b, options.prefix_b, options.keys, opened)
        _require_entries(side_a, side_b, options)
        common = common_rows(side_a, side_b)
        found = [*structure_differences(side_a, side_b, common, options)]
        compared = ValueComparison(side_a, side_b, common, options)
        if options.with_values:
            found += compared.differences(on_progress)
        found.sort(key=lambda each: (natural_key(each.fqn), each.owner or 0, each.aspect.value))
        return Comparison(
            url_a=side_a.url,
            url_b=side_b.url,
            names=len(common),
            values=options.with_values,
            nbytes=compared.nbytes,
            across_dtypes=options.across_dtypes,
            trusted_nbytes=compared.trusted_nbytes,
            seconds=time.perf_counter() - began,
            differences=tuple(each for each in found if each.aspect not in options.uncounted),
            arrangement=tuple(each for each in found if each.aspect in options.uncounted),
        )


def _require_entries(a: ComparedCheckpoint, b: ComparedCheckpoint, options: ComparisonOptions) -> None:
    if not a.rows and not b.rows:
        raise InvalidArgumentError(
            f"nothing is left to compare: keys {list(options.keys)}, prefixes {options.prefix_a!r} and "
            f"{options.prefix_b!r} leave no name of {a.url} nor of {b.url}."
        )
