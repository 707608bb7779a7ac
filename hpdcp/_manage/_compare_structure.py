"""In what two checkpoints differ but for their values, from their metadata alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpdcp._format.columns import EntryKind
from hpdcp._manage._compared_checkpoint import ComparedCheckpoint, shape_text
from hpdcp._manage._comparison import Aspect, ComparisonOptions, Difference, EntryKey


def common_rows(a: ComparedCheckpoint, b: ComparedCheckpoint) -> dict[EntryKey, tuple[int, int]]:
    """The names that both have → their rows on both sides."""
    return {key: (row, b.rows[key]) for key, row in a.rows.items() if key in b.rows}


def structure_differences(
    a: ComparedCheckpoint,
    b: ComparedCheckpoint,
    common: Mapping[EntryKey, tuple[int, int]],
    options: ComparisonOptions,
) -> Iterator[Difference]:
    """Names on one side only; other kinds, shapes, dtypes, boxes, ties and nesting.

    A name that one side alone has is no more than a tie where both have another name of the same tensor: of tied
    weights Hugging Face's files hold one.
    """
    stored_a = {a.metadata.resolve(row) for row, _ in common.values()}
    for key, row in ((key, row) for key, row in a.rows.items() if key not in common):
        elsewhere = a.metadata.resolve(row) in stored_a
        yield Difference.of(key, Aspect.TIES if elsewhere else Aspect.ONLY_IN_A, _with_tie(a, row), "")
    stored_b = {b.metadata.resolve(row) for _, row in common.values()}
    for key, row in ((key, row) for key, row in b.rows.items() if key not in common):
        elsewhere = b.metadata.resolve(row) in stored_b
        yield Difference.of(key, Aspect.TIES if elsewhere else Aspect.ONLY_IN_B, "", _with_tie(b, row))
    # Under prefixes names are not compared as they are, nor are the ways to them.
    same_nesting = not (options.prefix_a or options.prefix_b) and a.metadata.origin == b.metadata.origin
    for key, (row_a, row_b) in common.items():
        path_a, path_b = a.metadata.entries.paths[row_a], b.metadata.entries.paths[row_b]
        if same_nesting and path_a != path_b:
            yield Difference.of(key, Aspect.NESTING, path_a, path_b)
        if a.kind(row_a) is not b.kind(row_b):
            yield Difference.of(key, Aspect.KIND, a.described(row_a), b.described(row_b))
        elif a.kind(row_a) is not EntryKind.OBJECT:
            yield from _tensor_differences(key, a, b, row_a, row_b)


def _tensor_differences(
    key: EntryKey, a: ComparedCheckpoint, b: ComparedCheckpoint, row_a: int, row_b: int
) -> Iterator[Difference]:
    if a.dtype(row_a) != b.dtype(row_b):
        yield Difference.of(key, Aspect.DTYPE, a.dtype(row_a), b.dtype(row_b))
    if a.shape(row_a) != b.shape(row_b):
        yield Difference.of(key, Aspect.SHAPE, shape_text(a.shape(row_a)), shape_text(b.shape(row_b)))
    elif a.boxes(row_a) != b.boxes(row_b):
        yield Difference.of(key, Aspect.LAYOUT, _box_count(a, row_a), _box_count(b, row_b))
    if a.tied_to(row_a) != b.tied_to(row_b):
        yield Difference.of(key, Aspect.TIES, a.tied_to(row_a) or "not tied", b.tied_to(row_b) or "not tied")


def _with_tie(side: ComparedCheckpoint, row: int) -> str:
    tied = side.tied_to(row)
    return side.described(row) + (f", tied to {tied}" if tied else "")


def _box_count(side: ComparedCheckpoint, row: int) -> str:
    count = side.chunk_count(row)
    return f"{count} box{'' if count == 1 else 'es'}"
