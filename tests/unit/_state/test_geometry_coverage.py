"""`missing` and `BoxIndex`, compared with painting every cell of a small array."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._state.box_index import BoxIndex
from hpdcp._state.coverage import missing
from hpdcp._state.geometry import Box, intersect


@st.composite
def box_and_boxes(draw: st.DrawFn, side: int, most: int) -> tuple[Box, list[Box]]:
    ndim = draw(st.integers(0, 3))

    def box() -> Box:
        spans = [sorted((draw(st.integers(0, side)), draw(st.integers(0, side)))) for _ in range(ndim)]
        return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))

    return box(), [box() for _ in range(draw(st.integers(0, most)))]


def painted(boxes: list[Box], side: int, ndim: int) -> NDArray[np.int64]:
    count = np.zeros((side,) * ndim, np.int64)
    for box in boxes:
        count[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))] += 1
    return count


@given(box_and_boxes(side=4, most=14))
@settings(max_examples=300, deadline=None)
def test_missing_finds_a_hole_exactly_when_a_cell_is_unpainted(case: tuple[Box, list[Box]]) -> None:
    want, have = case
    count = painted(have, 4, want.ndim)
    inside = painted([want], 4, want.ndim) > 0
    hole = missing(want, have)
    if hole is None:
        assert (count[inside] > 0).all()
    else:
        assert hole.volume > 0
        assert intersect(want, hole) == hole
        assert (count[painted([hole], 4, want.ndim) > 0] == 0).all()


def test_boxes_on_a_diagonal_cover_every_projection_and_still_leave_holes() -> None:
    diagonal = [Box((0, 0), (2, 2)), Box((2, 2), (2, 2))]
    assert missing(Box((0, 0), (4, 4)), diagonal) == Box((0, 2), (2, 2))


def test_overlap_does_not_make_up_for_a_hole_of_the_same_volume() -> None:
    twice = [Box((0,), (4,)), Box((0,), (2,)), Box((0,), (2,)), Box((5,), (3,))]
    assert sum(box.volume for box in twice) > 8
    assert missing(Box((0,), (8,)), twice) == Box((4,), (1,))
    assert missing(Box((0,), (8,)), [Box((0,), (4,)), Box((0,), (4,))]) == Box((4,), (4,))


def test_a_single_missing_shard_of_many_is_returned_whole() -> None:
    grid = [Box((4 * i, 2 * j), (4, 2)) for i, j in itertools.product(range(16), range(16))]
    assert missing(Box((0, 0), (64, 32)), grid) is None
    gone = grid.pop(137)
    assert missing(Box((0, 0), (64, 32)), grid) == gone


def test_the_one_cell_of_a_0_dim_tensor_is_covered_or_not() -> None:
    assert missing(Box((), ()), []) == Box((), ())
    assert missing(Box((), ()), [Box((), ())]) is None


def test_nothing_is_missing_from_an_empty_box() -> None:
    assert missing(Box((3, 0), (2, 0)), []) is None


def columns(boxes: list[Box], ndim: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (
        np.array([box.offsets for box in boxes], np.int64).reshape(len(boxes), ndim),
        np.array([box.sizes for box in boxes], np.int64).reshape(len(boxes), ndim),
    )


@given(box_and_boxes(side=6, most=60))
@settings(max_examples=200, deadline=None)
def test_the_index_finds_the_rows_that_comparing_all_finds(case: tuple[Box, list[Box]]) -> None:
    query, boxes = case
    index = BoxIndex(*columns(boxes, query.ndim))
    assert index.overlapping(query).tolist() == [i for i, box in enumerate(boxes) if intersect(box, query) is not None]


@pytest.mark.parametrize("grid", [(2048, 1, 1), (1, 2048, 1), (1, 1, 2048), (64, 32, 1), (1, 64, 32), (2, 1, 1024)])
@pytest.mark.parametrize("along", [0, 1, 2, None])
def test_the_index_tests_about_as_many_rows_as_it_finds(grid: tuple[int, int, int], along: int | None) -> None:
    rng = np.random.default_rng(0)
    boxes = [Box(tuple(4 * i for i in at), (4, 4, 4)) for at in itertools.product(*map(range, grid))]
    rng.shuffle(boxes)
    index = BoxIndex(*columns(boxes, 3))
    middle = [4 * (n // 2) for n in grid]
    # One box, or all boxes along one dimension.
    query = Box(
        tuple(0 if d == along else middle[d] for d in range(3)),
        tuple(4 * grid[d] if d == along else 4 for d in range(3)),
    )
    found = index.overlapping(query)
    assert len(found) == (1 if along is None else grid[along])
    assert len(index._tested(query)) <= 16 * len(found) ** 0.5 + 4 * len(found)


def test_many_0_dim_boxes_all_meet_the_one_cell() -> None:
    index = BoxIndex(np.zeros((300, 0), np.int64), np.zeros((300, 0), np.int64))
    assert index.overlapping(Box((), ())).tolist() == list(range(300))


def test_an_index_of_nothing_finds_nothing() -> None:
    assert BoxIndex(np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64)).overlapping(Box((0, 0), (1, 1))).size == 0


def test_a_query_of_other_dimensions_is_refused() -> None:
    index = BoxIndex(np.zeros((3, 2), np.int64), np.ones((3, 2), np.int64))
    with pytest.raises(InvalidArgumentError, match="3 dimensions was looked up among boxes of 2"):
        index.overlapping(Box((0, 0, 0), (1, 1, 1)))
    with pytest.raises(InvalidArgumentError, match=r"found \(3, 2\) and \(3,\)"):
        BoxIndex(np.zeros((3, 2), np.int64), np.ones(3, np.int64))


def test_coordinates_too_many_for_one_key_are_still_found() -> None:
    rng = np.random.default_rng(1)
    offsets = rng.permuted(np.tile(np.arange(600)[:, None], (1, 9)), axis=0).astype(np.int64)
    index = BoxIndex(offsets, np.ones_like(offsets))
    for row in (0, 17, 599):
        assert index.overlapping(Box(tuple(offsets[row].tolist()), (1,) * 9)).tolist() == [row]
