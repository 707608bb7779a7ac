"""Which names are keys, and what a listing says of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import InvalidArgumentError, KeyNotFoundError
from hpdcp.testing._backend.base import BackendFixtures, put

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


class NamesContract(BackendFixtures):
    """Keys, and listings of them."""

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
