"""How the buffers of an object become parts: sizes, order, what is copied, and whose memory is used how long."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._base.errors import InvalidArgumentError
from hpdcp_backends._s3.upload import PartCutter, UploadPart, part_size

KIB = 1 << 10
MIB = 1 << 20
TIB = 1 << 40
LARGE = 256 * KIB
"""From here on a buffer is not copied."""


@pytest.mark.parametrize("size", [0, 1, 16 * MIB, 9000 * 16 * MIB, 9000 * 16 * MIB + 1, TIB, 5 * TIB - 1, 5 * TIB])
def test_no_object_has_more_than_nine_thousand_parts(size: int) -> None:
    part = part_size(size, 16 * MIB)
    assert -(-size // part) <= 9000
    assert part % MIB == 0
    assert part >= 16 * MIB
    assert part <= 5 << 30  # the largest that S3 takes


def test_parts_grow_only_when_they_must() -> None:
    assert part_size(9000 * 16 * MIB, 16 * MIB) == 16 * MIB
    assert part_size(9000 * 16 * MIB + 1, 16 * MIB) == 17 * MIB


sizes = st.lists(
    st.one_of(st.integers(0, 2000), st.integers(LARGE - 2, LARGE + 2), st.integers(0, 3 * MIB)), max_size=12
)


@given(sizes=sizes, part_bytes=st.integers(1, 2 * MIB), copy=st.booleans())
@settings(max_examples=60, deadline=None)
def test_parts_hold_the_buffers_in_order_and_are_equal_but_the_last(
    sizes: list[int], part_bytes: int, copy: bool
) -> None:
    part_bytes = max(part_bytes, sum(sizes) // 200)
    buffers = [memoryview(random.Random(number).randbytes(size)) for number, size in enumerate(sizes)]
    expected = b"".join(buffers)
    parts = list(PartCutter("key", iter(buffers), size=len(expected), part_bytes=part_bytes, copy=copy))
    assert b"".join(view for part in parts for view in part.views) == expected
    assert [part.size for part in parts] == [sum(map(len, part.views)) for part in parts]
    assert all(part.size == part_bytes for part in parts[:-1])
    assert parts[-1].size <= part_bytes
    assert parts[-1].size or not expected
    if copy:
        assert all(part.pinned is None for part in parts)


def test_large_buffers_are_not_copied_and_small_ones_are_joined() -> None:
    large = bytearray(3 * LARGE)
    small = [memoryview(b"x" * 1000)] * 50
    [part] = PartCutter("key", [memoryview(large), *small], size=len(large) + 50_000, part_bytes=4 * MIB)
    assert part.views[0].obj is large
    assert len(part.views) == 2
    large[0] = 7
    assert part.views[0][0] == 7
    assert part.pinned == len(large)


def test_a_producer_that_reuses_its_memory_after_the_window_spoils_nothing() -> None:
    # What the uploader does: before a buffer is asked for, parts are sent that use one the producer may overwrite.
    window, piece, count = 4 * MIB, LARGE, 100
    slots = memoryview(bytearray(window + 2 * piece))
    sent: list[bytes] = []
    waiting: deque[UploadPart] = deque()

    def pieces() -> Iterator[memoryview]:
        for number in range(count):
            start = number * piece % len(slots)
            slots[start : start + piece] = bytes([number]) * piece
            yield slots[start : start + piece]

    def send(before: int) -> None:
        while waiting and waiting[0].pinned is not None and waiting[0].pinned <= before:
            sent.append(b"".join(waiting.popleft().views))

    cutter = PartCutter(
        "key",
        pieces(),
        size=count * piece,
        part_bytes=MIB + 1,
        before_each=lambda received: send(received - window),
    )
    for part in cutter:
        waiting.append(part)
    send(count * piece)
    assert b"".join(sent) == b"".join(bytes([number]) * piece for number in range(count))


@pytest.mark.parametrize("announced", [0, 9, 11, 100])
def test_another_total_than_announced_is_refused_before_the_last_part(announced: int) -> None:
    parts: list[UploadPart] = []
    with pytest.raises(InvalidArgumentError, match="'key'"):
        parts.extend(PartCutter("key", [memoryview(b"12345")] * 2, size=announced, part_bytes=5))
    assert sum(part.size for part in parts) <= min(announced, 10)


def test_a_producer_that_never_ends_is_stopped_at_the_announced_size() -> None:
    def endless() -> Iterator[memoryview]:
        while True:
            yield memoryview(b"x")

    with pytest.raises(InvalidArgumentError, match="at least 11"):
        list(PartCutter("key", endless(), size=10, part_bytes=4))
