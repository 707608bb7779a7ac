"""Boxes, runs and flat intervals, compared with numpy's own indexing of a small array of cell numbers."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._state import _runs, coverage, geometry, views
from hpdcp._state._runs import Split, boxes_from_runs, owned_runs, split_flat_interval
from hpdcp._state.geometry import Box, flat_start, intersect, is_contiguous, relative, row_runs

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    spans = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@st.composite
def shaped_boxes(draw: st.DrawFn, count: int = 1) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def numbered(shape: tuple[int, ...]) -> NDArray[np.int64]:
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def index_runs(indices: ArrayLike) -> list[tuple[int, int]]:
    """The stretches of consecutive ascending numbers in `indices`, in order, as (start, length)."""
    found: list[tuple[int, int]] = []
    for index in np.asarray(indices).tolist():
        if found and sum(found[-1]) == index:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return found


def cells(box: Box, shape: tuple[int, ...]) -> NDArray[np.int64]:
    return numbered(shape)[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))].reshape(-1)


def test_the_examples_in_the_docstrings_are_true() -> None:
    for module, examples in ((geometry, 10), (_runs, 5), (coverage, 2), (views, 1)):
        outcome = doctest.testmod(module)
        assert outcome.attempted >= examples and not outcome.failed


@given(shaped_boxes(count=2))
@settings(max_examples=150, deadline=None)
def test_an_intersection_holds_exactly_the_cells_of_both(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    met = intersect(a, b)
    common = set(cells(a, shape).tolist()) & set(cells(b, shape).tolist())
    assert (set() if met is None else set(cells(met, shape).tolist())) == common
    assert (met is None) == (not common)


@given(shaped_boxes(count=1))
@settings(max_examples=100, deadline=None)
def test_volume_counts_cells_and_shifting_is_undone_by_relative(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    assert box.volume == len(cells(box, shape))
    assert box.is_empty == (box.volume == 0)
    outer = Box(tuple(range(3, 3 + box.ndim)), box.sizes)
    assert relative(Box(tuple(map(sum, zip(box.offsets, outer.offsets, strict=True))), box.sizes), outer) == box


@given(shaped_boxes(count=1))
@settings(max_examples=200, deadline=None)
def test_row_runs_are_the_maximal_runs_of_the_cell_numbers(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    numbers = cells(box, shape)
    starts, length = row_runs(box, shape)
    assert [(start, length) for start in starts.tolist()] == index_runs(numbers)
    assert is_contiguous(box, shape) == (len(index_runs(numbers)) <= 1)
    if numbers.size:
        assert flat_start(box, shape) == numbers[0] == starts[0]


@given(shapes.filter(lambda shape: 0 not in shape), st.data())
@settings(max_examples=200, deadline=None)
def test_a_flat_interval_becomes_few_boxes_with_its_cells_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    parts = split_flat_interval(shape, start, stop)
    assert [n for box, _ in parts for n in cells(box, shape).tolist()] == list(range(start, stop))
    assert all(at == flat_start(box, shape) and is_contiguous(box, shape) for box, at in parts)
    assert len(parts) <= max(2 * len(shape) - 1, 1)
    assert not any(box.is_empty for box, _ in parts)


def test_a_flat_interval_needs_all_of_the_2k_minus_1_boxes_at_worst() -> None:
    assert len(split_flat_interval((4, 4, 4), 1, 63)) == 5


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_an_array_without_elements_has_one_flat_interval_and_no_box(shape: tuple[int, ...]) -> None:
    assert split_flat_interval(shape, 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_a_flat_interval_outside_the_array_is_refused(start: int, stop: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"shape \(3, 4\), which has 12 elements"):
        split_flat_interval((3, 4), start, stop)


def test_boxes_from_runs_hold_each_combination_once() -> None:
    runs = [[(0, 2), (5, 1)], [(1, 1), (3, 2)]]
    found = [n for box in boxes_from_runs(runs) for n in cells(box, (6, 5)).tolist()]
    assert sorted(found) == sorted(numbered((6, 5))[np.ix_([0, 1, 5], [1, 3, 4])].reshape(-1).tolist())
    assert boxes_from_runs([[(0, 2)], []]) == []


def divided(rows: list[int], split: Split) -> list[int]:
    def share(of: list[int], parts: int, index: int) -> list[int]:
        size = -(-len(of) // parts)
        return of[index * size : (index + 1) * size]

    pieces = [share(rows, split.pieces, piece) for piece in range(split.pieces)]
    return [row for piece in pieces for row in share(piece, split.parts, split.index)]


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 4)), max_size=3))
@settings(max_examples=300, deadline=None)
def test_owned_runs_are_the_rows_that_dividing_a_list_leaves(size: int, cuts: list[tuple[int, int, int]]) -> None:
    splits = [Split(0, parts, index % parts, pieces) for parts, index, pieces in cuts]
    rows = list(range(size))
    for split in splits:
        rows = divided(rows, split)
    (runs,) = owned_runs((size,), splits)
    assert [row for start, length in runs for row in range(start, start + length)] == rows
    assert list(runs) == index_runs(rows)
