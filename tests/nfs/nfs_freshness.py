"""What one client has done, another sees at once, whatever it looked at before."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import CheckpointNotFoundError, KeyNotFoundError
from hpdcp.testing._backend.base import put
from hpdcp_backends.nfs import NfsBackend
from tests.nfs.conftest import Mounts

TURNS = 40
"""Enough for many of them to fall into one step of the server's clock with the look before, 10 ms here."""


@pytest.fixture
def writer(mounts: Mounts) -> NfsBackend:
    return NfsBackend(str(mounts.a))


@pytest.fixture
def reader(mounts: Mounts) -> NfsBackend:
    return NfsBackend(str(mounts.b))


def read(backend: NfsBackend, key: str) -> bytes:
    return backend.read(key)


def read_range(backend: NfsBackend, key: str) -> bytes:
    target = bytearray(3)
    backend.read_ranges(key, [ByteRange(0, 3)], [memoryview(target)])
    return bytes(target)


def size_alone(backend: NfsBackend, key: str) -> bytes:
    assert backend.size(key) == 3
    return b"new"


def listed_size(backend: NfsBackend, key: str) -> bytes:
    sizes = {info.key: info.size for info in backend.list_keys()}
    if key not in sizes:
        raise KeyNotFoundError(key)
    assert sizes[key] == 3
    return b"new"


LOOKS = pytest.mark.parametrize("look", [read, read_range, size_alone, listed_size], ids=lambda look: look.__name__)


@LOOKS
def test_a_key_that_was_looked_for_in_vain_is_found(
    writer: NfsBackend, reader: NfsBackend, look: Callable[[NfsBackend, str], bytes]
) -> None:
    for turn in range(TURNS):
        key = f"key-{turn}"
        with pytest.raises(KeyNotFoundError):
            look(reader, key)
        writer.publish(key, b"new")
        assert look(reader, key) == b"new", turn


def warm(folder: Path, key: str) -> None:
    """Let the client know the folder and the file, as any program on its host might."""
    os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    assert (folder / key).read_bytes() == b"older"


@LOOKS
def test_a_key_that_was_replaced_is_the_new_one(
    mounts: Mounts, writer: NfsBackend, reader: NfsBackend, look: Callable[[NfsBackend, str], bytes]
) -> None:
    for turn in range(TURNS):
        key = f"key-{turn}"
        writer.publish(key, b"older")
        warm(mounts.b, key)
        writer.publish(key, b"new")
        assert look(reader, key) == b"new", turn


@LOOKS
def test_a_key_whose_old_file_lives_on_under_another_name_is_the_new_one(
    mounts: Mounts, writer: NfsBackend, reader: NfsBackend, look: Callable[[NfsBackend, str], bytes]
) -> None:
    # The server still knows the old file, so that only the name tells; within one step of its clock, NFS 3 would not.
    for turn in range(5):
        key = f"key-{turn}"
        writer.publish(key, b"older")
        warm(mounts.b, key)
        time.sleep(0.05)
        os.rename(mounts.a / key, mounts.a / f"kept-{turn}")
        writer.publish(key, b"new")
        assert look(reader, key) == b"new", turn


@LOOKS
def test_a_key_that_was_replaced_is_the_new_one_where_somebody_holds_the_old_one_open(
    mounts: Mounts, writer: NfsBackend, reader: NfsBackend, look: Callable[[NfsBackend, str], bytes]
) -> None:
    writer.publish("key", b"older")
    warm(mounts.b, "key")
    with open(mounts.b / "key", "rb") as held:
        assert held.read(1) == b"o"
        writer.publish("key", b"new")
        assert look(reader, "key") == b"new"


@LOOKS
def test_a_key_that_was_deleted_is_gone(
    writer: NfsBackend, reader: NfsBackend, look: Callable[[NfsBackend, str], bytes]
) -> None:
    for turn in range(TURNS):
        key = f"key-{turn}"
        writer.publish(key, b"new")
        assert look(reader, key) == b"new"
        writer.delete([key])
        with pytest.raises(KeyNotFoundError):
            look(reader, key)


def test_data_replaced_by_as_many_bytes_is_read_anew(mounts: Mounts, writer: NfsBackend, reader: NfsBackend) -> None:
    for turn in range(TURNS):
        data = bytes([turn + 1]) * 100_000
        put(writer, "key", data)
        os.stat(mounts.b / "key")
        target = bytearray(100_000)
        reader.read_ranges("key", [ByteRange(0, 100_000)], [memoryview(target)])
        assert target == data, turn


def test_every_listing_is_fresh(writer: NfsBackend, reader: NfsBackend) -> None:
    expected: set[str] = set()
    for turn in range(4 * TURNS):
        if turn % 3 == 2:
            gone = expected.pop()
            writer.delete([gone])
        else:
            writer.publish(f"{turn}", b"")
            expected.add(f"{turn}")
        assert {info.key for info in reader.list_keys()} == expected, turn


def test_a_listing_is_fresh_after_quiet_times_too(writer: NfsBackend, reader: NfsBackend) -> None:
    writer.publish("first", b"")
    for _ in range(5):
        assert [info.key for info in reader.list_keys()] == ["first"]
        time.sleep(1)
    for turn in range(TURNS):
        writer.publish(f"{turn}", b"")
        assert f"{turn}" in {info.key for info in reader.list_keys()}


def test_a_root_that_was_looked_for_in_vain_is_found(mounts: Mounts) -> None:
    for turn in range(10):
        reader = NfsBackend(str(mounts.b / f"run-{turn}" / "deep" / "step_1"))
        with pytest.raises(CheckpointNotFoundError):
            reader.list_keys()
        with pytest.raises(KeyNotFoundError):
            reader.read("folder/key")
        writer = NfsBackend(str(mounts.a / f"run-{turn}" / "deep" / "step_1"))
        writer.prepare()
        if turn % 2:
            assert reader.list_keys() == []
        writer.publish("folder/key", b"new")
        if turn % 3:
            assert [info.key for info in reader.list_keys("folder")] == ["folder/key"]
        assert reader.read("folder/key") == b"new"


def test_a_root_that_was_looked_for_in_vain_can_be_written_to(mounts: Mounts) -> None:
    for turn in range(10):
        here, there = (NfsBackend(str(root / f"run-{turn}" / "step_1")) for root in (mounts.a, mounts.b))
        with pytest.raises(CheckpointNotFoundError):
            there.list_keys()
        here.prepare()
        if turn % 2:
            there.prepare()
        there.publish("folder/key", b"new")
        assert here.read("folder/key") == b"new"


def test_a_root_that_was_moved_and_made_anew_is_the_new_one(mounts: Mounts) -> None:
    here, there = (NfsBackend(str(root / "run" / "step_1")) for root in (mounts.a, mounts.b))
    here.prepare()
    here.publish("folder/key", b"old")
    assert there.read("folder/key") == b"old"
    # Of a folder that is moved within the same step of the server's clock as this look, NFS 3 would tell nothing.
    time.sleep(0.05)
    os.rename(mounts.a / "run", mounts.a / "moved")
    here.prepare()
    here.publish("folder/key", b"new")
    assert NfsBackend(there.url).read("folder/key") == b"new"
    assert [info.key for info in NfsBackend(there.url).list_keys(recursive=True)] == ["folder/key"]


def test_a_folder_that_was_removed_and_made_anew_is_the_new_one(writer: NfsBackend, reader: NfsBackend) -> None:
    for turn in range(10):
        writer.publish("folder/key", b"old")
        assert reader.read("folder/key") == b"old"
        writer.delete(["folder/key"])
        writer.publish("folder/other", f"{turn}".encode())
        assert reader.read("folder/other") == f"{turn}".encode()
        assert [info.key for info in reader.list_keys("folder")] == ["folder/other"]
        writer.delete(["folder/other"])


def test_what_is_deleted_need_not_have_been_seen_before(writer: NfsBackend, reader: NfsBackend) -> None:
    for turn in range(TURNS):
        key = f"folder/{turn}"
        with pytest.raises(KeyNotFoundError):
            reader.read(key)
        writer.publish(key, b"x")
        reader.delete([key])
        with pytest.raises(KeyNotFoundError):
            writer.read(key)
    assert writer.list_keys(recursive=True) == []


def test_a_key_among_thousands_is_found(mounts: Mounts, writer: NfsBackend, reader: NfsBackend) -> None:
    for number in range(3000):
        Path(mounts.served / f"filler-{number:05d}").touch()
    for turn in range(TURNS):
        with pytest.raises(KeyNotFoundError):
            reader.read(f"key-{turn}")
        writer.publish(f"key-{turn}", b"new")
        assert reader.read(f"key-{turn}") == b"new", turn
    assert len(reader.list_keys()) == 3000 + TURNS
