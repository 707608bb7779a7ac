"""Which stored boxes meet a wanted one, against trying them all; and that few are tried."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._format.columns import ChunkTable, Entry, EntryKind, EntryTable
from hpdcp._format.metadata import Metadata
from hpdcp._plan import stored_index
from hpdcp._plan.stored_index import StoredIndex
from hpdcp._state.geometry import Box, intersect


def _metadata(shape: tuple[int, ...], boxes: Sequence[Box]) -> Metadata:
    entries = EntryTable.from_entries([Entry("w", '["w"]', EntryKind.TENSOR, "float32", shape)])
    return Metadata(entries, ChunkTable.from_boxes([0] * len(boxes), [(box.offsets, box.sizes) for box in boxes]))


def _cuts(size: int) -> st.SearchStrategy[list[int]]:
    inner = st.lists(st.integers(1, max(1, size - 1)), max_size=6, unique=True)
    return inner.map(lambda at: sorted({0, size, *(a for a in at if a < size)}))


@st.composite
def _grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes between cuts along every dimension, some left out, some twice, some that overlap others."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    axes = [[(a, b - a) for a, b in itertools.pairwise(draw(_cuts(size)))] for size in shape]
    cells = [Box(tuple(a for a, _ in pick), tuple(n for _, n in pick)) for pick in itertools.product(*axes)]
    kept = [box for box in cells if draw(st.integers(0, 9)) > 0]
    kept += draw(st.lists(st.sampled_from([*cells, Box.whole(shape)]), max_size=2))
    return shape, sorted(kept, key=lambda box: (box.offsets, box.sizes))


@st.composite
def _inside(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    begins = [draw(st.integers(0, size - 1)) for size in shape]
    return Box(tuple(begins), tuple(draw(st.integers(1, size - a)) for a, size in zip(begins, shape, strict=True)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_found_is_what_trying_every_box_finds(data: st.DataObject) -> None:
    shape, boxes = data.draw(_grids())
    looked_up = StoredIndex(_metadata(shape, boxes))
    for want in (data.draw(_inside(shape)), data.draw(st.sampled_from(boxes)) if boxes else Box.whole(shape)):
        found = list(looked_up.overlaps(0, want))
        assert all(boxes[row] == have and part == intersect(want, have) for row, have, part in found)
        expected = {have for have in boxes if intersect(want, have) is not None}
        assert {have for _, have, _ in found} == ({want} if want in expected else expected)
        assert len(found) == len({have for _, have, _ in found})


@pytest.mark.parametrize(("axis", "shape"), [(0, (512, 4096)), (1, (512, 4096)), (2, (4, 8, 512)), (0, (512,))])
def test_no_box_is_tried_in_vain_whichever_dimension_is_sharded(
    axis: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 128
    step = shape[axis] // count
    sizes = tuple(step if dim == axis else size for dim, size in enumerate(shape))
    boxes = [
        Box(tuple(number * step if dim == axis else 0 for dim in range(len(shape))), sizes) for number in range(count)
    ]
    tried = []
    monkeypatch.setattr(stored_index, "intersect", lambda want, have: tried.append(have) or intersect(want, have))
    monkeypatch.setattr(stored_index, "BoxIndex", None)
    looked_up = StoredIndex(_metadata(shape, boxes))
    want = Box(
        tuple(step * 40 + 1 if dim == axis else 0 for dim in range(len(shape))),
        tuple(step * 3 if dim == axis else size for dim, size in enumerate(shape)),
    )
    assert [row for row, _, _ in looked_up.overlaps(0, want)] == [40, 41, 42, 43]
    assert tried == boxes[40:44]


def test_shards_of_other_sizes_and_a_tensor_of_one_cell_are_found() -> None:
    ragged = [Box((0, 0), (1, 4)), Box((1, 0), (5, 4)), Box((6, 0), (2, 4))]
    assert [row for row, _, _ in StoredIndex(_metadata((8, 4), ragged)).overlaps(0, Box((5, 1), (2, 2)))] == [1, 2]
    twice = [Box((), ()), Box((), ())]
    assert list(StoredIndex(_metadata((), twice)).overlaps(0, Box((), ()))) == [(0, Box((), ()), Box((), ()))]
    assert np.array_equal(
        stored_index._StoredBoxes(np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64)).meeting(Box((0, 0), (1, 1))),
        [],
    )
