from __future__ import annotations

import doctest
import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hpdcp._base import splitting
from hpdcp._base.splitting import assign_evenly, batches, cut_rows


def test_the_examples_in_its_documentation_hold() -> None:
    outcome = doctest.testmod(splitting)
    assert outcome.attempted and not outcome.failed


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 40))
def test_rows_are_cut_into_parts_that_are_small_enough_or_single(sizes: list[int], most: int) -> None:
    axis, parts = cut_rows(sizes, most)
    row = math.prod(sizes) // sizes[axis]
    assert [start for start, _ in parts] == [sum(length for _, length in parts[:i]) for i in range(len(parts))]
    assert sum(length for _, length in parts) == sizes[axis]
    assert all(length == 1 or length * row <= most for _, length in parts)
    assert len(parts) == 1 or (parts[0][1] + 1) * row > most


@given(st.lists(st.integers(0, 9)), st.integers(0, 20))
def test_batches_hold_everything_in_order_and_are_as_large_as_they_may(weights: list[int], most: int) -> None:
    found = list(batches(weights, int, most))
    assert [weight for batch in found for weight in batch] == weights
    assert all(len(batch) == 1 or sum(batch) <= most for batch in found)
    assert all(sum(batch) + following[0] > most for batch, following in pairwise(found))


@given(st.lists(st.integers(0, 9)), st.integers(1, 4))
def test_work_goes_to_whoever_has_least(weights: list[int], workers: int) -> None:
    loads = [0] * workers
    for weight, worker in zip(weights, assign_evenly(weights, workers), strict=True):
        assert worker == loads.index(min(loads))
        loads[worker] += weight
