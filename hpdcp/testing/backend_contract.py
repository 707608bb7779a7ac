"""What every backend must do, as tests."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    KeyExistsError,
    KeyNotFoundError,
    KeyTruncatedError,
    NotSupportedError,
    StorageError,
)

ODD_KEYS = (
    "with space",
    "hash#tag",
    "per%cent",
    "%20",
    "layers[1]",
    "a::b",
    "star*?",
    "plus+and&is=",
    'quote\'d "twice"',
    "tilde~",
    "~",
    ".hidden",
    "..dots",
    "ünï-日本-🙂",
    "x" * 200,
)

BAD_KEYS = (
    "",
    "/absolute",
    "a//b",
    "folder/",
    ".",
    "..",
    "../outside",
    "a/../b",
    "a/./b",
    "nul\0",
    ".hpdcp-tmp-1",
    "\ud800",
)

LARGE = 24 << 20
"""Bytes enough for every backend of ours to use several threads, or several parts."""


class BackendContract(ABC):
    """Inherit, override the fixture `backend` and `reopen`, and name the class `Test...`.

    `backend` gives an instance on a root that is prepared, empty and the test's own. `reopen` gives a second instance
    on the same root, as another process would open it.
    """

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("override the fixture `backend`: it gives an instance on an empty, prepared root")

    @abstractmethod
    def reopen(self, backend: Backend) -> Backend:
        """A second instance on the root of `backend`, sharing nothing with it."""

    @pytest.fixture
    def other(self, backend: Backend) -> Iterator[Backend]:
        with self.reopen(backend) as other:
            yield other

    # Facts and life cycle

    def test_its_declared_facts_make_sense(self, backend: Backend) -> None:
        assert backend.name
        assert backend.url
        assert backend.coalesce_gap >= 0
        assert backend.max_read_bytes > 0
        assert backend.write_window is None or backend.write_window > 0

    def test_preparing_twice_changes_nothing(self, backend: Backend) -> None:
        put(backend, "key", b"here")
        backend.prepare()
        assert backend.read("key") == b"here"

    def test_closing_twice_is_fine(self, backend: Backend) -> None:
        put(backend, "key", b"bytes")
        backend.read("key")
        backend.close()
        backend.close()

    # Writing

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
            raise OSError("the producer's own trouble")

        with pytest.raises(OSError, match="the producer's own trouble") as caught:
            backend.write("key", pieces(), size=size, exclusive=exclusive and backend.conditional_create)
        assert not isinstance(caught.value, StorageError)
        assert other.list_keys() == []

    def test_a_failing_replacement_leaves_the_old_bytes(self, backend: Backend, other: Backend) -> None:
        put(backend, "key", b"old")

        def pieces() -> Iterator[memoryview]:
            yield memoryview(b"ne")
            raise RuntimeError("no more")

        with pytest.raises(RuntimeError, match="no more"):
            backend.write("key", pieces(), size=3, exclusive=False)
        assert other.read("key") == b"old"
        assert [info.key for info in other.list_keys()] == ["key"]

    @pytest.mark.parametrize("announced", [0, 5, 7, 100])
    def test_a_total_other_than_announced_is_refused_and_leaves_no_key(
        self, backend: Backend, other: Backend, announced: int
    ) -> None:
        with pytest.raises(InvalidArgumentError, match="key"):
            backend.write("key", [memoryview(b"abc"), memoryview(b"def")], size=announced, exclusive=False)
        assert other.list_keys() == []

    def test_a_replaced_key_keeps_its_old_bytes_until_the_new_are_complete(
        self, backend: Backend, other: Backend
    ) -> None:
        put(backend, "key", b"old")
        seen: list[tuple[bytes, list[str]]] = []

        def pieces() -> Iterator[memoryview]:
            for _ in range(LARGE >> 20):
                yield memoryview(b"n" * (1 << 20))
            seen.append((other.read("key"), [info.key for info in other.list_keys()]))

        backend.write("key", pieces(), size=LARGE, exclusive=False)
        assert seen == [(b"old", ["key"])]
        assert other.read("key") == b"n" * LARGE

    # Exclusive creation

    def test_exclusive_creation_refuses_a_key_that_is_there(self, backend: Backend, other: Backend) -> None:
        put(other, "taken", b"first")
        asked: list[bool] = []

        def pieces() -> Iterator[memoryview]:
            asked.append(True)
            yield memoryview(b"second")

        if not backend.conditional_create:
            with pytest.raises(NotSupportedError):
                backend.write("taken", pieces(), size=6, exclusive=True)
            return
        with pytest.raises(KeyExistsError, match="taken") as caught:
            backend.write("taken", pieces(), size=6, exclusive=True)
        assert isinstance(caught.value, FileExistsError)
        assert isinstance(caught.value, StorageError)
        assert backend.url in str(caught.value)
        assert not asked
        assert other.read("taken") == b"first"

    def test_of_two_writers_that_create_one_key_exactly_one_succeeds(self, backend: Backend, other: Backend) -> None:
        if not backend.conditional_create:
            pytest.skip("this backend cannot create exclusively")
        for attempt in range(8):
            won: list[bytes] = []

            work = partial(create_together, f"raced-{attempt}", threading.Barrier(2), won)
            run_together([partial(work, backend, b"a" * 1000), partial(work, other, b"b" * 2000)])
            assert len(won) == 1
            assert backend.read(f"raced-{attempt}") == won[0]

    # Publishing

    def test_publishing_creates_and_replaces(self, backend: Backend, other: Backend) -> None:
        backend.publish("pointer", b"one")
        assert other.read("pointer") == b"one"
        backend.publish("pointer", b"second")
        assert other.read("pointer") == b"second"
        assert [(info.key, info.size) for info in other.list_keys()] == [("pointer", 6)]

    def test_a_reader_sees_the_old_bytes_or_the_new_and_nothing_else(self, backend: Backend, other: Backend) -> None:
        def version(number: int) -> bytes:
            return bytes([number]) * (1 + number * 1000)

        backend.publish("pointer", version(0))
        published = threading.Event()
        seen: list[int] = []

        def watch() -> None:
            while not published.is_set() or not seen:
                data = other.read("pointer")
                assert data == version(data[0])
                seen.append(data[0])

        def publish() -> None:
            try:
                for number in range(1, 40):
                    backend.publish("pointer", version(number))
            finally:
                published.set()

        run_together([watch, publish])
        assert seen == sorted(seen)
        assert other.read("pointer") == version(39)

    # Listing

    def test_an_empty_root_lists_nothing(self, backend: Backend) -> None:
        assert backend.list_keys() == []
        assert backend.list_keys(recursive=True) == []
        assert backend.list_keys("no/such/folder") == []

    def test_a_listing_says_size_and_time_and_is_sorted(self, backend: Backend) -> None:
        put(backend, "b", b"22")
        put(backend, "a", b"1")
        put(backend, "B", b"")
        listed = backend.list_keys()
        assert [(info.key, info.size) for info in listed] == [("B", 0), ("a", 1), ("b", 2)]
        assert all(abs(info.modified - time.time()) < 3600 for info in listed)

    def test_a_listing_is_never_stale(self, backend: Backend, other: Backend) -> None:
        assert other.list_keys() == []
        with pytest.raises(KeyNotFoundError):
            other.read("key")
        put(backend, "key", b"bytes")
        assert [info.key for info in other.list_keys()] == ["key"]
        assert other.read("key") == b"bytes"
        backend.publish("key", b"longer bytes")
        assert [info.size for info in other.list_keys()] == [12]
        backend.delete(["key"])
        assert other.list_keys() == []

    def test_folders_are_entered_only_when_asked(self, backend: Backend, other: Backend) -> None:
        for key in ("top", "folder/inside", "folder/deep/er", "folderol"):
            put(backend, key, b"x")
        assert [info.key for info in other.list_keys()] == ["folderol", "top"]
        assert [info.key for info in other.list_keys("folder")] == ["folder/inside"]
        assert [info.key for info in other.list_keys("folder", recursive=True)] == ["folder/deep/er", "folder/inside"]
        assert [info.key for info in other.list_keys(recursive=True)] == [
            "folder/deep/er",
            "folder/inside",
            "folderol",
            "top",
        ]

    # Keys

    def test_folders_of_the_root_are_told(self, backend: Backend, other: Backend) -> None:
        for key in ("a", "b/1", "b/2", "c d/deep/1"):
            put(backend, key, b"")
        assert other.list_folders() == ["b", "c d"]

    def test_odd_keys_are_kept_as_they_are(self, backend: Backend, other: Backend) -> None:
        for number, key in enumerate(ODD_KEYS):
            put(backend, key, f"{number}".encode())
        assert [info.key for info in other.list_keys()] == sorted(ODD_KEYS)
        for number, key in enumerate(ODD_KEYS):
            assert other.read(key) == f"{number}".encode()
        other.delete(ODD_KEYS)
        assert backend.list_keys() == []

    def test_a_key_may_have_folders(self, backend: Backend, other: Backend) -> None:
        put(backend, "a b/c#/%20/key", b"deep")
        backend.publish("a b/published", b"too")
        assert other.read("a b/c#/%20/key") == b"deep"
        assert other.read("a b/published") == b"too"
        other.delete(["a b/c#/%20/key", "a b/published"])
        assert backend.list_keys(recursive=True) == []
        put(backend, "a b/c#/%20/key", b"again")
        assert other.read("a b/c#/%20/key") == b"again"

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_key_that_could_leave_the_root_is_refused(self, backend: Backend, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: backend.size(key),
            lambda: backend.read(key),
            lambda: backend.read_ranges(key, [], []),
            lambda: backend.map_range(key, ByteRange(0, 0)),
            lambda: backend.write(key, [], size=0, exclusive=False),
            lambda: backend.publish(key, b""),
            lambda: backend.delete([key]),
        ]
        if key:
            calls.append(lambda: backend.list_keys(key))
        for call in calls:
            with pytest.raises(InvalidArgumentError, match="key"):
                call()
        assert backend.list_keys(recursive=True) == []

    # Reading

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

    # Deleting

    def test_deleting_removes_these_keys_and_no_others(self, backend: Backend, other: Backend) -> None:
        for key in ("one", "two", "twofold", "folder/two"):
            put(backend, key, key.encode())
        backend.delete(key for key in ("two", "folder/two", "never-there", "no/such/folder"))
        assert [info.key for info in other.list_keys(recursive=True)] == ["one", "twofold"]
        with pytest.raises(KeyNotFoundError):
            backend.read("two")
        backend.delete([])
        backend.delete(["two"])

    def test_clearing_away_leftovers_takes_no_key(self, backend: Backend, other: Backend) -> None:
        put(backend, "key", b"bytes")
        put(backend, "_rank0_.dead.safetensors", b"whole")
        other.remove_leftovers(silent_for=0, belongs=lambda key: True)
        assert [info.key for info in backend.list_keys()] == ["_rank0_.dead.safetensors", "key"]

    # Threads

    def test_one_instance_serves_several_threads(self, backend: Backend) -> None:
        def work(number: int) -> None:
            data = bytes([number]) * (10_000 + number)
            for turn in range(5):
                key = f"{number}-{turn}"
                put(backend, key, data)
                target = bytearray(len(data))
                backend.read_ranges(key, [ByteRange(0, len(data))], [memoryview(target)])
                assert target == data
                assert backend.read(key) == data

        run_together([partial(work, number) for number in range(4)])
        assert len(backend.list_keys()) == 20


def put(backend: Backend, key: str, data: bytes) -> None:
    """Store `data` under `key`."""
    backend.write(key, [memoryview(data)], size=len(data), exclusive=False)


def create_together(key: str, start: threading.Barrier, won: list[bytes], writer: Backend, content: bytes) -> None:
    """Create `key` when everybody else does; add `content` to `won` if that succeeded."""
    start.wait(timeout=30)
    try:
        writer.write(key, [memoryview(content)], size=len(content), exclusive=True)
    except KeyExistsError:
        return
    won.append(content)


def run_together(works: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own; what one of them raises is raised here."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
