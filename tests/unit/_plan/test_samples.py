"""Which bytes stand for a box: few, spread over it, the same on every rank."""

from __future__ import annotations

import itertools

import pytest

from hpdcp._format.metadata import MetadataIndex
from hpdcp._plan.samples import SAMPLE_BYTES, sample_spans


@pytest.mark.parametrize("nbytes", [1, 16, SAMPLE_BYTES, SAMPLE_BYTES + 16, 100_000, 1 << 20, (1 << 40) + 16])
def test_they_are_within_the_box_in_order_and_of_64_kib(nbytes: int) -> None:
    spans = sample_spans(MetadataIndex("w", (0,), (nbytes,)), nbytes)
    assert spans[0][0] == 0 and spans[-1][1] == nbytes
    assert all(start < stop for start, stop in spans)
    assert all(start % 16 == 0 for start, _ in spans[:-1])
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(spans))
    assert sum(stop - start for start, stop in spans) == min(nbytes, SAMPLE_BYTES)
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(spans)]
    assert max(gaps, default=0) <= nbytes / 5


def test_they_differ_by_name_and_box_and_from_nothing_else() -> None:
    size = 1 << 30
    w = MetadataIndex("w", (0,), (size,))
    assert sample_spans(w, size) == sample_spans(MetadataIndex("w", (0,), (size,)), size)
    assert sample_spans(w, size) != sample_spans(MetadataIndex("v", (0,), (size,)), size)
    assert sample_spans(w, size) != sample_spans(MetadataIndex("w", (8,), (size,)), size)
