"""Which tensors share memory: against the address of every byte."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._state.overlaps import has_shared_elements, shared_elements


def _addresses(tensor: torch.Tensor) -> list[int]:
    places = [0]
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = [place + stride * number for place in places for number in range(size)]
    itemsize = tensor.element_size()
    return [tensor.data_ptr() + place * itemsize + byte for place in places for byte in range(itemsize)]


@st.composite
def _views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """A slice of `base` in one of many shapes, turned or as bytes; or a window of any strides."""
    if draw(st.booleans()):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        strides = [draw(st.integers(0, 7)) for _ in shape]
        room = len(base) - 1 - sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
        if room >= 0:
            return base.as_strided(shape, strides, draw(st.integers(0, room)))
    view = base.view(draw(st.sampled_from([(24,), (4, 6), (2, 3, 4), (6, 4), (2, 12)])))
    for axis in range(view.dim()):
        start = draw(st.integers(0, view.shape[axis]))
        cut = slice(start, draw(st.integers(start, view.shape[axis])), draw(st.sampled_from([1, 1, 1, 2])))
        view = view[(slice(None),) * axis + (cut,)]
    form = draw(st.sampled_from(["as it is", "as it is", "turned", "bytes"]))
    if form == "bytes" and view.is_contiguous() and view.stride(-1) == 1:
        return view.view(torch.uint8)
    return view.transpose(0, -1) if form == "turned" else view


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_pairs_are_found_exactly_where_bytes_are_shared(data: st.DataObject) -> None:
    base = torch.zeros(24)
    tensors = data.draw(st.lists(_views(base), max_size=5))
    bytes_of = [_addresses(tensor) for tensor in tensors]
    for tensor, places in zip(tensors, bytes_of, strict=True):
        assert has_shared_elements(tensor) == (len(set(places)) < len(places))
    truth = {
        pair
        for pair in itertools.combinations(range(len(tensors)), 2)
        if set(bytes_of[pair[0]]) & set(bytes_of[pair[1]])
    }
    found = {(min(pair), max(pair)) for pair in shared_elements(tensors)}
    assert found <= truth
    assert bool(found) == bool(truth)


def test_thousands_of_views_of_one_tensor_are_not_compared_pair_by_pair() -> None:
    rows, columns = torch.zeros(5000, 4), torch.zeros(4, 1000)
    views = [*rows, *columns.unbind(1)]
    assert list(shared_elements(views)) == []
    assert list(shared_elements([*views, columns[1:3, 500:502]])) != []
