"""Cut links, stopped servers, full exports, files that the server has forgotten, files deleted while they are open."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import KeyNotFoundError, StorageError
from hpdcp.testing._backend.base import put, run_together
from hpdcp_backends.nfs import NfsBackend
from tests.nfs.conftest import Mounts


@pytest.fixture
def writer(mounts: Mounts) -> NfsBackend:
    return NfsBackend(str(mounts.a))


@pytest.fixture
def reader(mounts: Mounts) -> NfsBackend:
    return NfsBackend(str(mounts.b))


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def eventually(condition: Callable[[], bool]) -> None:
    """Fail unless the condition comes true within a time that nothing here comes near."""
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_full_export_is_an_error_and_the_old_bytes_stand(small: Path, exclusive: bool) -> None:
    backend = NfsBackend(str(small))
    backend.publish("key", b"old")
    before = free_bytes(small)
    size = 24 << 20
    name = "new" if exclusive else "key"
    with pytest.raises(StorageError, match=rf"'{name}' in .*: No space left on device. The file system is") as caught:
        backend.write(name, [memoryview(bytes(1 << 20))] * 24, size=size, exclusive=exclusive)
    assert caught.value.errno == errno.ENOSPC
    assert backend.read("key") == b"old"
    assert [info.key for info in backend.list_keys()] == ["key"]
    # Requests that are still on their way hold the file for a moment.
    eventually(lambda: os.listdir(small) == ["key"] and free_bytes(small) > before - (1 << 20))
    put(backend, "key", bytes(1 << 20))
    assert backend.read("key") == bytes(1 << 20)


def test_an_export_that_is_full_when_a_producer_fails_tells_of_the_producer(small: Path) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(14 << 20))
        raise RuntimeError("the producer's own trouble")

    # Either the full disk is noticed first, or the producer's error is told; never what close makes of it.
    with pytest.raises((RuntimeError, StorageError)) as caught:
        NfsBackend(str(small)).write("key", pieces(), size=15 << 20, exclusive=True)
    assert "producer" in str(caught.value) or getattr(caught.value, "errno", None) == errno.ENOSPC
    eventually(lambda: os.listdir(small) == [])


def interrupted(stop: str, start: str, seconds: float, works: list[Callable[[], None]]) -> None:
    """Run the works while the link, or the server, is away for a while."""
    # One process, started beforehand: a fork in between would close the works' files, and wait for the server itself.
    with subprocess.Popen(["sh", "-ec", f"sleep 0.3; {stop}; sleep {seconds}; {start}"]) as interruption:
        run_together(works)
    assert interruption.returncode == 0


def stamped(number: int) -> bytes:
    return bytes([number % 256]) * 200_000


def busy(backend: NfsBackend, key: str, seconds: float) -> Callable[[], None]:
    """Publish and read for so long; every read must be what was published last."""

    def work() -> None:
        until = time.monotonic() + seconds
        number = 0
        while time.monotonic() < until:
            backend.publish(key, stamped(number))
            assert backend.read(key) == stamped(number)
            number += 1

    return work


def test_a_link_that_is_cut_for_some_seconds_costs_only_time(writer: NfsBackend, reader: NfsBackend) -> None:
    link = f"ip link set {os.environ['HPDCP_TEST_NFS_B_LINK']}"
    interrupted(f"{link} down", f"{link} up", 3, [busy(reader, "b", 1.0), busy(writer, "a", 1.0)])
    assert writer.read("b") == reader.read("b")
    assert {info.key for info in reader.list_keys()} == {"a", "b"}


def test_a_server_that_is_restarted_costs_only_time(writer: NfsBackend, reader: NfsBackend) -> None:
    start = "rpc.nfsd 4; echo Y > /proc/fs/nfsd/v4_end_grace"
    interrupted("rpc.nfsd 0", start, 2, [busy(reader, "b", 1.0), busy(writer, "a", 1.0)])
    assert writer.read("b") == reader.read("b")
    assert {info.key for info in writer.list_keys()} == {"a", "b"}


def test_all_ranges_of_a_read_are_of_one_version_while_the_key_is_replaced(
    writer: NfsBackend, reader: NfsBackend
) -> None:
    put(writer, "key", stamped(0))
    done = threading.Event()
    ranges = [ByteRange(start, 1000) for start in range(0, 200_000, 1000)]

    def replace() -> None:
        try:
            for number in range(1, 60):
                put(writer, "key", stamped(number))
        finally:
            done.set()

    def read() -> None:
        random.Random(1).shuffle(ranges)
        last = 0
        while not done.is_set():
            target = memoryview(bytearray(200_000))
            into = [target[range_.offset : range_.stop] for range_ in ranges]
            reader.read_ranges("key", ranges, into)
            assert bytes(target) == stamped(target[0])
            assert target[0] >= last
            last = target[0]

    run_together([replace, read])


def test_a_key_deleted_while_it_is_read_is_whole_or_missing(writer: NfsBackend, reader: NfsBackend) -> None:
    outcomes: set[str] = set()
    size = 8 << 20
    for turn in range(8):
        put(writer, "key", bytes([turn + 1]) * size)
        target = bytearray(size)

        def read(target: bytearray = target, turn: int = turn) -> None:
            try:
                reader.read_ranges("key", [ByteRange(0, size)], [memoryview(target)])
            except KeyNotFoundError:
                outcomes.add("missing")
            else:
                assert target == bytes([turn + 1]) * size
                outcomes.add("whole")

        def delete(turn: int = turn) -> None:
            time.sleep(turn * 0.004)
            writer.delete(["key"])

        run_together([read, delete])
    assert outcomes <= {"missing", "whole"}
    assert outcomes


def test_a_file_that_the_server_replaced_by_itself_is_read_anew(mounts: Mounts, reader: NfsBackend) -> None:
    for turn in range(10):
        (mounts.served / "key").write_bytes(stamped(turn))
        with open(mounts.b / "key", "rb"):
            assert reader.read("key") == stamped(turn)
            (mounts.served / "key").unlink()
            (mounts.served / "key").write_bytes(stamped(turn + 100))
            assert reader.read("key") == stamped(turn + 100)
        (mounts.served / "key").unlink()


def test_files_deleted_while_open_are_not_listed_and_their_folder_goes_when_it_can(
    mounts: Mounts, reader: NfsBackend
) -> None:
    put(reader, "folder/key", b"x" * 100_000)
    with open(mounts.b / "folder" / "key", "rb") as held:
        reader.delete(["folder/key"])
        left = os.listdir(mounts.b / "folder")
        assert len(left) == 1 and left[0].startswith(".nfs")
        assert reader.list_keys(recursive=True) == []
        assert held.read() == b"x" * 100_000
    put(reader, "folder/key", b"again")
    held = open(mounts.b / "folder" / "key", "rb")  # noqa: SIM115 - closed by another thread, a moment later
    threading.Timer(0.1, held.close).start()
    reader.delete(["folder/key"])
    assert not (mounts.b / "folder").exists()


KILLED = """
import itertools, sys
from hpdcp_backends.nfs import NfsBackend
backend = NfsBackend(sys.argv[1])
print("ready", flush=True)
for number in itertools.count(1):
    backend.publish("pointer", bytes([number % 256]) * 200_000)
"""


def test_a_client_killed_while_publishing_leaves_old_or_new_bytes(mounts: Mounts, reader: NfsBackend) -> None:
    reader.publish("pointer", stamped(0))
    for turn in range(3):
        with subprocess.Popen([sys.executable, "-c", KILLED, mounts.a], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            for _ in range(5 + turn):
                data = reader.read("pointer")
                assert data == data[:1] * 200_000
            child.send_signal(signal.SIGKILL)
        data = reader.read("pointer")
        assert data == data[:1] * 200_000
        assert [info.key for info in reader.list_keys()] == ["pointer"]
