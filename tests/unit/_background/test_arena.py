"""Shared memory for staging: laid out without overlaps, reused, seen by whoever has the descriptor."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpdcp._background._arena import Arena, Segment, tensor_at
from hpdcp._base.errors import StorageError

MIB = 1 << 20


@given(st.lists(st.lists(st.integers(0, 5 * MIB), max_size=12), min_size=1, max_size=4))
def test_ranges_never_overlap_and_lie_inside_their_segments(saves: list[list[int]]) -> None:
    arena = Arena()
    try:
        for lengths in saves:
            ranges = arena.lay_out(lengths)
            assert [where.length for where in ranges] == lengths
            taken: dict[int, int] = {}
            for where in ranges:
                assert where.offset % 64 == 0
                assert where.offset >= taken.get(where.segment, 0)
                taken[where.segment] = where.offset + where.length
                assert taken[where.segment] <= arena.segments[where.segment].size
    finally:
        arena.close()


def test_the_memory_of_one_save_serves_the_next() -> None:
    arena = Arena()
    arena.lay_out([3 * MIB, 5, 0, 7 * MIB])
    before = arena.capacity, len(arena.segments)
    for lengths in ([3 * MIB, 5, 0, 7 * MIB], [10 * MIB], [1] * 1000, []):
        arena.lay_out(lengths)
    assert (arena.capacity, len(arena.segments)) == before
    assert before == (12 * MIB, 1)
    arena.close()


def test_one_growing_value_does_not_gather_segments_without_end() -> None:
    """A log that is part of the state outgrows its segment again and again."""
    arena = Arena()
    for size in range(1, 60):
        arena.lay_out([size * MIB])
    assert arena.capacity <= 4 * 60 * MIB
    assert len(arena.segments) <= 16
    arena.close()


def test_another_holder_of_the_descriptor_sees_what_was_written() -> None:
    arena = Arena()
    (where,) = arena.lay_out([16])
    tensor_at(arena.memory(where), torch.int32, (2, 2)).copy_(torch.tensor([[1, 2], [3, 4]]))
    segment = arena.segments[0]
    theirs = Segment(os.dup(segment.descriptor), segment.size, writable=False)
    assert tensor_at(theirs.memory(where), torch.int32, (4,)).tolist() == [1, 2, 3, 4]
    assert theirs.memory(where).readonly
    theirs.close()
    arena.close()


def test_views_outlive_the_arena() -> None:
    arena = Arena()
    (where,) = arena.lay_out([8])
    tensor = tensor_at(arena.memory(where), torch.int64, ())
    tensor.fill_(7)
    arena.close()
    assert tensor.item() == 7


def test_closing_gives_the_descriptors_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        arena = Arena()
        arena.lay_out([MIB])
        arena.close()
        del arena
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_the_system_has_not_got_is_said_to_be_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(StorageError, match="async_staging_budget"):
        Arena().lay_out([MIB])


def test_empty_ranges_give_empty_tensors() -> None:
    arena = Arena()
    (where,) = arena.lay_out([0])
    assert tensor_at(arena.memory(where), torch.float32, (0, 4)).shape == (0, 4)
    arena.close()
