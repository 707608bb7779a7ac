"""Keys stored from buffers that come one after the other."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Iterator

import pytest

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import InvalidArgumentError, StorageError
from hpdcp.testing._backend.base import LARGE, BackendFixtures, put


class WritingContract(BackendFixtures):
    """What `write` takes, when it asks for it, and what it leaves when it fails."""

    def test_what_was_written_is_read_by_another_instance(self, backend: Backend, other: Backend) -> None:
        put(backend, "key", b"some bytes")
        assert other.read("key") == b"some bytes"
        assert other.size("key") == 10

    def test_an_empty_key_is_a_key(self, backend: Backend, other: Backend) -> None:
        backend.write("nothing", [], size=0, exclusive=backend.conditional_create)
        backend.write("nothing either", [memoryview(b"")], size=0, exclusive=False)
        backend.publish("published", b"")
        assert [(info.key, info.size) for info in other.list_keys()] == [
            ("nothing", 0),
            ("nothing either", 0),
            ("published", 0),
        ]
        assert other.read("nothing") == b""
        other.read_ranges("nothing", [ByteRange(0, 0)], [memoryview(bytearray())])

    def test_buffers_of_any_size_and_format_are_joined_in_order(self, backend: Backend) -> None:
        numbers = memoryview(array("q", range(1000)))
        pieces = [
            memoryview(b"start"),
            memoryview(b""),
            numbers,
            memoryview(b"")[:0],
            numbers.cast("B").cast("q", (10, 100)),
            memoryview(b"end"),
        ]
        expected = b"".join(pieces)
        backend.write("key", iter(pieces), size=len(expected), exclusive=False)
        assert backend.read("key") == expected

    def test_thousands_of_small_buffers_are_joined_in_order(self, backend: Backend) -> None:
        pieces = [bytes([number % 251]) * (number % 7) for number in range(5000)]
        expected = b"".join(pieces)
        backend.write("key", map(memoryview, pieces), size=len(expected), exclusive=False)
        assert backend.read("key") == expected

    def test_a_large_key_comes_back_whole(self, backend: Backend, other: Backend) -> None:
        data = random.Random(1).randbytes(LARGE + 12345)
        third = len(data) // 3
        pieces = [memoryview(data)[:third], memoryview(data)[third : third + 1], memoryview(data)[third + 1 :]]
        backend.write("large", pieces, size=len(data), exclusive=backend.conditional_create)
        target = bytearray(len(data))
        cut = third + 17
        other.read_ranges(
            "large",
            [ByteRange(cut, len(data) - cut), ByteRange(0, cut)],
            [memoryview(target)[cut:], memoryview(target)[:cut]],
        )
        assert other.size("large") == len(data)
        assert target == data
        assert other.read("large") == data

    def test_a_producer_may_reuse_its_memory_after_the_write_window(self, backend: Backend) -> None:
        window = backend.write_window
        if window is None:
            pytest.skip("this backend may use all buffers until write returns")
        piece = max(1, window // 8)
        slots = memoryview(bytearray((window // piece + 2) * piece))
        count = 5 * len(slots) // piece // 2

        def pieces() -> Iterator[memoryview]:
            for number in range(count):
                start = number * piece % len(slots)
                slots[start : start + piece] = bytes([number % 256]) * piece
                yield slots[start : start + piece]

        backend.write("key", pieces(), size=count * piece, exclusive=False)
        stored = backend.read("key")
        for number in range(count):
            assert stored[number * piece : (number + 1) * piece] == bytes([number % 256]) * piece, number

    def test_buffers_are_asked_for_in_the_calling_thread(self, backend: Backend) -> None:
        threads: set[int] = set()

        def pieces() -> Iterator[memoryview]:
            for _ in range(LARGE >> 20):
                threads.add(threading.get_ident())
                yield memoryview(bytes(1 << 20))

        backend.write("key", pieces(), size=LARGE, exclusive=False)
        assert threads == {threading.get_ident()}

    @pytest.mark.parametrize("size", [10, LARGE])
    @pytest.mark.parametrize("exclusive", [True, False])
    def test_a_failing_producer_leaves_no_key(
        self, backend: Backend, other: Backend, size: int, exclusive: bool
    ) -> None:
        def pieces() -> Iterator[memoryview]:
            yield memoryview(bytes(size - 1))
            raise OSError("the producer's own error")

        with pytest.raises(OSError, match="the producer's own error") as caught:
            backend.write("key", pieces(), size=size, exclusive=exclusive and backend.conditional_create)
        assert not isinstance(caught.value, StorageError)
        assert other.list_keys() == []

    @pytest.mark.parametrize("announced", [0, 5, 7, 100])
    def test_a_total_other_than_announced_is_refused_and_leaves_no_key(
        self, backend: Backend, other: Backend, announced: int
    ) -> None:
        with pytest.raises(InvalidArgumentError, match="key"):
            backend.write("key", [memoryview(b"abc"), memoryview(b"def")], size=announced, exclusive=False)
        assert other.list_keys() == []
