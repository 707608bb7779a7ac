"""Keys read whole, in ranges, and mapped."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from functools import partial

import pytest

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    KeyNotFoundError,
    KeyTruncatedError,
    StorageError,
)
from hpdcp.testing._backend.base import LARGE, BackendFixtures, put


class ReadingContract(BackendFixtures):
    """What fills which buffer, and which errors say that it cannot."""

    def test_nothing_to_read_is_asked_for_all_the_same(self, backend: Backend, other: Backend) -> None:
        nothing = memoryview(bytearray())
        for ranges in ([], [ByteRange(0, 0)]):
            with pytest.raises(KeyNotFoundError):
                backend.read_ranges("key", ranges, [nothing] * len(ranges))
        put(backend, "key", b"12345")
        other.read_ranges("key", [ByteRange(5, 0)], [nothing])
        with pytest.raises(KeyTruncatedError):
            other.read_ranges("key", [ByteRange(6, 0)], [nothing])

    def test_ranges_fill_their_buffers(self, backend: Backend, other: Backend) -> None:
        data = random.Random(2).randbytes(100_000)
        put(backend, "key", data)
        ranges = [
            ByteRange(99_999, 1),
            ByteRange(0, 0),
            ByteRange(500, 1500),
            ByteRange(2000, 3000),
            ByteRange(1000, 2000),
            ByteRange(0, 100_000),
            ByteRange(1000, 2000),
            ByteRange(100_000, 0),
            ByteRange(0, 1),
        ]
        targets = [bytearray(range_.length) for range_ in ranges]
        other.read_ranges("key", ranges, [memoryview(target) for target in targets])
        assert targets == [data[range_.offset : range_.stop] for range_ in ranges]

    def test_thousands_of_ranges_go_straight_into_one_memory(self, backend: Backend, other: Backend) -> None:
        data = random.Random(3).randbytes(400_000)
        put(backend, "key", data)
        memory = memoryview(bytearray(200_000))
        columns = [(row * 100, row * 50) for row in range(4000)]
        random.Random(4).shuffle(columns)
        other.read_ranges(
            "key",
            [ByteRange(offset, 50) for offset, _ in columns],
            [memory[place : place + 50] for _, place in columns],
        )
        assert memory == b"".join(data[row * 100 : row * 100 + 50] for row in range(4000))

    def test_buffers_of_another_format_are_filled(self, backend: Backend) -> None:
        numbers = array("q", range(500))
        put(backend, "key", numbers.tobytes())
        target = array("q", bytes(4000))
        backend.read_ranges("key", [ByteRange(0, 4000)], [memoryview(target)])
        assert target == numbers

    def test_a_read_past_the_end_is_an_error_that_says_so(self, backend: Backend, other: Backend) -> None:
        put(backend, "short", bytes(100))
        for range_ in (ByteRange(90, 11), ByteRange(100, 1), ByteRange(5000, 10), ByteRange(0, LARGE)):
            into = [memoryview(bytearray(10)), memoryview(bytearray(range_.length))]
            calls: list[Callable[[], object]] = [
                partial(other.read_ranges, "short", [ByteRange(0, 10), range_], into),
            ]
            if other.map_range("short", ByteRange(0, 1)) is not None:
                calls.append(partial(other.map_range, "short", range_))
            for call in calls:
                with pytest.raises(KeyTruncatedError, match="short") as caught:
                    call()
                assert isinstance(caught.value, CorruptCheckpointError)
                assert isinstance(caught.value, StorageError)
                assert "100" in str(caught.value)
                assert str(range_.stop) in str(caught.value)
                assert other.url in str(caught.value)

    def test_a_missing_key_is_named(self, backend: Backend) -> None:
        calls: list[Callable[[], object]] = [
            lambda: backend.size("not-there"),
            lambda: backend.read("not-there"),
            lambda: backend.read_ranges("not-there", [ByteRange(0, 1)], [memoryview(bytearray(1))]),
            lambda: backend.read("no/such/folder"),
        ]
        put(backend, "there", b"x")
        if backend.map_range("there", ByteRange(0, 1)) is not None:
            calls.append(lambda: backend.map_range("not-there", ByteRange(0, 1)))
        for call in calls:
            with pytest.raises(KeyNotFoundError, match=r"not-there|no/such/folder") as caught:
                call()
            assert isinstance(caught.value, FileNotFoundError)
            assert isinstance(caught.value, StorageError)
            assert backend.url in str(caught.value)

    def test_buffers_that_do_not_fit_their_ranges_are_refused(self, backend: Backend) -> None:
        put(backend, "key", bytes(100))
        ten = memoryview(bytearray(10))
        for ranges, into in (
            ([ByteRange(0, 10)], []),
            ([ByteRange(0, 11)], [ten]),
            ([ByteRange(-1, 10)], [ten]),
            ([ByteRange(0, 10)], [memoryview(bytes(10))]),
            ([ByteRange(0, 5)], [ten[::2]]),
        ):
            with pytest.raises(InvalidArgumentError):
                backend.read_ranges("key", ranges, into)

    def test_a_key_replaced_between_two_reads_is_read_anew(self, backend: Backend, other: Backend) -> None:
        target = bytearray(5)
        for content in (b"first", b"other", b"third and longer"):
            backend.publish("key", content)
            other.read_ranges("key", [ByteRange(0, 5)], [memoryview(target)])
            assert target == content[:5]
            view = other.map_range("key", ByteRange(0, 5))
            assert view is None or view == content[:5]
            assert other.size("key") == len(content)

    def test_a_mapped_range_is_read_only_and_outlives_its_key(self, backend: Backend, other: Backend) -> None:
        data = random.Random(5).randbytes(50_000)
        put(backend, "key", data)
        view = other.map_range("key", ByteRange(4097, 20_000))
        if view is None:
            pytest.skip("this backend maps nothing")
        empty = other.map_range("key", ByteRange(50_000, 0))
        assert view.readonly
        backend.publish("key", b"short")
        assert view == data[4097:24_097]
        other.close()
        backend.delete(["key"])
        assert view == data[4097:24_097]
        assert empty is not None
        assert len(empty) == 0
