"""Chunks of zarr arrays: every element in one, each held by one rank or put together of all its parts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._state.coverage import missing
from hpdcp._state.geometry import Box
from hpdcp_backends._zarr import grid
from hpdcp_backends._zarr.grid import cells, chunk_shape

MIB = 1 << 20


def table(boxes: list[Box]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([box.offsets for box in boxes]), np.array([box.sizes for box in boxes])


def rows(*lengths: int, width: int = 1) -> list[Box]:
    """Boxes of whole rows, one after another."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [Box((start, 0), (length, width)) for start, length in zip(starts, lengths, strict=False)]


def grid_of(boxes: list[Box], *, itemsize: int = 4) -> tuple[int, ...]:
    shape = tuple(max(stops) for stops in zip(*(box.stops for box in boxes), strict=True))
    return chunk_shape(shape, itemsize, *table(boxes))


def test_even_shards_are_chunks_themselves() -> None:
    assert grid_of(rows(1024, 1024, 1024, 1024, width=1024)) == (1024, 1024)


def test_shards_of_which_the_last_is_shorter_are_chunks_themselves() -> None:
    assert grid_of(rows(1000, 1000, 1000, 7, width=1024)) == (1000, 1024)


def test_shards_on_two_dimensions_are_chunks_themselves() -> None:
    boxes = [Box((a, b), (1024, 2048)) for a in (0, 1024) for b in (0, 2048)]
    assert grid_of(boxes) == (1024, 2048)


def test_edges_that_have_a_large_step_in_common_keep_every_chunk_with_one_rank() -> None:
    boxes = rows(2048, 1024, 4096, width=1024)
    found = grid_of(boxes)
    assert found == (1024, 1024)
    assert all(cell.holder >= 0 for cell in cells((7168, 1024), found, *table(boxes)))


def test_edges_without_a_common_step_do_not_shatter_a_tensor() -> None:
    # A vocabulary of a prime number of rows, sharded twice on one dimension.
    boxes = rows(12565, 12564, 12564, 12564, width=768)
    found = grid_of(boxes)
    made = list(cells((50257, 768), found, *table(boxes)))
    assert found == (12565, 768)
    assert len(made) == 4
    passed = sum(part.volume for cell in made for row, part in cell.held if row != cell.held[0][0])
    assert passed < 10 * 768


def test_a_small_tensor_is_one_chunk_however_many_ranks_hold_it() -> None:
    assert grid_of(rows(*[64] * 64)) == (4096, 1)


def test_shards_that_are_small_share_chunks_that_are_not() -> None:
    boxes = rows(*[4] * 1024, width=4096)
    found = grid_of(boxes)
    assert math.prod(found) * 4 >= grid.SMALL_BYTES
    assert len(list(cells((4096, 4096), found, *table(boxes)))) <= 64


def test_a_large_shard_is_cut_into_chunks_that_readers_can_hold() -> None:
    boxes = rows(1 << 18, 1 << 18, width=1024)
    found = grid_of(boxes)
    assert math.prod(found) * 4 <= grid.LARGE_BYTES
    assert (1 << 18) % found[0] == 0
    assert grid_of([Box((0, 0), (1 << 18, 1023))]) == (65536, 1023)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that cover it once each, by cuts of any unevenness."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        if box.sizes[axis] == 1:
            boxes.append(box)
            continue
        at = draw(st.integers(1, box.sizes[axis] - 1))
        for begin, size in ((0, at), (at, box.sizes[axis] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += begin
            sizes[axis] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, boxes


@given(partitions(), st.integers(1, 300), st.integers(2, 4))
@settings(deadline=None, max_examples=150)
def test_chunks_cover_a_tensor_once_and_their_parts_cover_them(
    given_: tuple[tuple[int, ...], list[Box]], small: int, factor: int
) -> None:
    shape, boxes = given_
    offsets, sizes = table(boxes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "SMALL_BYTES", small)
        patch.setattr(grid, "LARGE_BYTES", small * factor)
        steps = chunk_shape(shape, 4, offsets, sizes)
    assert all(1 <= step <= size for step, size in zip(steps, shape, strict=True))
    made = list(cells(shape, steps, offsets, sizes))
    seen = np.zeros(shape, dtype=np.int64)
    for cell in made:
        seen[tuple(slice(a, b) for a, b in zip(cell.box.offsets, cell.box.stops, strict=True))] += 1
        assert all(offset % step == 0 for offset, step in zip(cell.box.offsets, steps, strict=True))
        if cell.holder >= 0:
            held = boxes[cell.holder]
            assert missing(cell.box, [held]) is None
        else:
            assert missing(cell.box, [part for _, part in cell.held]) is None
            assert all(missing(part, [boxes[row]]) is None for row, part in cell.held)
            assert sum(part.volume for _, part in cell.held) == cell.box.volume
    assert (seen == 1).all()
    assert len(made) == math.prod(-(-size // step) for size, step in zip(shape, steps, strict=True))
    # Where every edge lies on the grid, nothing has to be put together.
    aligned = all(
        edge % step == 0 or edge == size
        for box in boxes
        for edges in (box.offsets, box.stops)
        for edge, step, size in zip(edges, steps, shape, strict=True)
    )
    assert not aligned or all(cell.holder >= 0 for cell in made)


def test_a_box_held_twice_is_written_once() -> None:
    boxes = [Box((0,), (8,)), Box((0,), (8,)), Box((4,), (4,))]
    made = list(cells((8,), (4,), *table(boxes)))
    assert [(cell.box.offsets, cell.holder) for cell in made] == [((0,), 0), ((4,), 0)]


def test_all_positions_are_distinct() -> None:
    made = [cell.box.offsets for cell in cells((5, 4), (2, 3), *table([Box((0, 0), (5, 4))]))]
    assert made == list(itertools.product((0, 2, 4), (0, 3)))
