"""Keys that are created once, or replaced in one step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from hpdcp._base.backend import Backend, read_or_none
from hpdcp._base.errors import KeyChangedError, KeyExistsError, NotSupportedError, StorageError
from hpdcp.testing._backend.base import LARGE, BackendFixtures, create_together, put, run_together


class PublishingContract(BackendFixtures):
    """Exclusive creation, replacement and `publish`."""

    def test_a_failing_replacement_leaves_the_old_bytes(self, backend: Backend, other: Backend) -> None:
        put(backend, "key", b"old")

        def pieces() -> Iterator[memoryview]:
            yield memoryview(b"ne")
            raise RuntimeError("no more")

        with pytest.raises(RuntimeError, match="no more"):
            backend.write("key", pieces(), size=3, exclusive=False)
        assert other.read("key") == b"old"
        assert [info.key for info in other.list_keys()] == ["key"]

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

    def test_publishing_creates_and_replaces(self, backend: Backend, other: Backend) -> None:
        backend.publish("pointer", b"one")
        assert other.read("pointer") == b"one"
        backend.publish("pointer", b"second")
        assert other.read("pointer") == b"second"
        assert [(info.key, info.size) for info in other.list_keys()] == [("pointer", 6)]

    def test_a_key_is_published_only_while_it_is_what_is_expected(self, backend: Backend, other: Backend) -> None:
        backend.publish_if("pointer", b"one", expected=None)
        backend.publish_if("pointer", b"second", expected=b"one")
        for stale in (None, b"one", b"secon"):
            with pytest.raises(KeyChangedError, match="pointer") as caught:
                other.publish_if("pointer", b"lost", expected=stale)
            assert other.url in str(caught.value)
        with pytest.raises(KeyChangedError, match="never-there"):
            backend.publish_if("never-there", b"lost", expected=b"")
        assert other.read("pointer") == b"second"
        assert [(info.key, info.size) for info in other.list_keys()] == [("pointer", 6)]
        backend.publish_if("pointer", b"second", expected=b"second")
        backend.delete(["pointer"])
        backend.publish_if("pointer", b"", expected=None)
        backend.publish_if("pointer", b"last", expected=b"")
        assert other.read("pointer") == b"last"

    def test_of_those_that_expect_the_same_exactly_one_publishes(self, backend: Backend, other: Backend) -> None:
        """Each counts one up, from what it has read; a publication that is lost is missing in the end."""
        if not backend.conditional_publish:
            pytest.skip("this backend cannot compare and publish in one step")
        writers, rounds = [backend, other] * 3, 8

        def count(writer: Backend) -> None:
            for _ in range(rounds):
                while True:
                    found = read_or_none(writer, "counter")
                    try:
                        writer.publish_if("counter", b"%d" % (int(found or b"0") + 1), expected=found)
                    except KeyChangedError:
                        continue
                    break

        run_together([partial(count, writer) for writer in writers])
        assert backend.read("counter") == b"%d" % (len(writers) * rounds)
        assert [info.key for info in other.list_keys()] == ["counter"]

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
