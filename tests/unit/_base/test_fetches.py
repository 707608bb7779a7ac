"""Which requests serve a set of ranges: none too many, and little that nobody wants."""

from __future__ import annotations

import doctest
import random

from hypothesis import given
from hypothesis import strategies as st

from hpdcp._base import _byte_ranges, _keys, _storage_errors
from hpdcp._base.backend import ByteRange, Fetch, fetches

KIB = 1 << 10
MIB = 1 << 20


def _fetched(spans: list[tuple[int, int]], *, gap: int = MIB, most_bytes: int = 16 * MIB) -> list[Fetch]:
    ranges = [ByteRange(offset, length) for offset, length in spans]
    return fetches(ranges, [memoryview(bytearray(r.length)) for r in ranges], gap=gap, most_bytes=most_bytes)


def _served(found: list[Fetch]) -> int:
    return sum(fetch.range.length for fetch in found)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 120)), max_size=30),
    st.integers(0, 60),
    st.integers(1, 200),
)
def test_every_buffer_gets_its_bytes(spans: list[tuple[int, int]], gap: int, most_bytes: int) -> None:
    data = random.Random(7).randbytes(700)
    ranges = [ByteRange(offset, length) for offset, length in spans]
    targets = [bytearray(length) for _, length in spans]
    found = fetches(ranges, [memoryview(target) for target in targets], gap=gap, most_bytes=most_bytes)
    for fetch in found:
        assert 0 < fetch.range.length <= most_bytes
        if fetch.target is not None:
            fetch.target[:] = data[fetch.range.offset : fetch.range.stop]
        else:
            fetch.scatter(memoryview(data)[fetch.range.offset : fetch.range.stop])
    assert targets == [data[offset : offset + length] for offset, length in spans]
    assert [fetch.range.offset for fetch in found] == sorted(fetch.range.offset for fetch in found)


def test_ranges_that_touch_share_a_request() -> None:
    found = _fetched([(i * KIB, KIB) for i in range(1000)], gap=0)
    assert [fetch.range for fetch in found] == [ByteRange(0, 1000 * KIB)]


def test_small_gaps_are_read_with_what_is_around_them() -> None:
    assert len(_fetched([(i * 20 * KIB, 4 * KIB) for i in range(100)])) == 1


def test_large_gaps_are_read_only_while_they_are_a_tenth_of_what_is_wanted() -> None:
    eighths = _fetched([(i * 8 * MIB, MIB) for i in range(10)], gap=8 * MIB, most_bytes=1 << 30)
    assert _served(eighths) == 10 * MIB
    nearly_all = _fetched([(i * MIB, MIB - 64 * KIB) for i in range(10)])
    assert len(nearly_all) == 1


def test_no_gap_is_longer_than_the_backend_says() -> None:
    assert len(_fetched([(0, 10 * MIB), (10 * MIB + 9 * KIB, 10)], gap=8 * KIB)) == 2


def test_a_long_range_becomes_requests_of_one_length_straight_into_its_buffer() -> None:
    found = _fetched([(5, 33 * MIB)])
    assert [fetch.range.length for fetch in found] == [11 * MIB] * 3
    assert all(fetch.target is not None for fetch in found)
    assert found[-1].range.stop == 5 + 33 * MIB


def test_nothing_wanted_is_nothing_fetched() -> None:
    assert _fetched([]) == []
    assert _fetched([(10, 0), (20, 0)]) == []


def test_the_examples_in_the_docstrings_hold() -> None:
    for module in (_byte_ranges, _keys, _storage_errors):
        outcome = doctest.testmod(module)
        assert outcome.attempted and not outcome.failed
