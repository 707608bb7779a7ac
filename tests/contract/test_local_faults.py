"""The local backend on storage that fails: full, read-only, forbidden, damaged, interrupted."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import KeyTruncatedError, StorageError
from hpdcp.testing._backend.base import LARGE, put
from hpdcp_backends.local import LocalBackend


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of the test's own."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting a file system takes the right to; the limit on a file's size is tested in its place")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("size", [6 << 20, LARGE])
def test_a_full_disk_is_reported_and_what_was_written_is_removed(mounted: Path, size: int, exclusive: bool) -> None:
    backend = LocalBackend(str(mounted / "step"))
    backend.prepare()
    put(backend, "before", b"x" * 1000)
    pieces = [memoryview(bytes(1 << 20))] * (size >> 20)
    with pytest.raises(StorageError, match=r"'data' in .*/step.*full: free space") as caught:
        backend.write("data", pieces, size=size, exclusive=exclusive)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(backend.url) == ["before"]
    put(backend, "after", bytes(3 << 20))


def test_a_pointer_that_does_not_fit_leaves_the_old_one(mounted: Path) -> None:
    backend = LocalBackend(str(mounted))
    backend.publish("pointer", b"old")
    with pytest.raises(StorageError, match="pointer"):
        backend.publish("pointer", bytes(5 << 20))
    assert backend.read("pointer") == b"old"
    assert os.listdir(mounted) == ["pointer"]


def test_a_read_only_file_system_is_reported(mounted: Path) -> None:
    backend = LocalBackend(str(mounted))
    put(backend, "key", b"bytes")
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    with pytest.raises(StorageError, match="read-only: save elsewhere"):
        backend.publish("key", b"new")
    with pytest.raises(StorageError, match="read-only"):
        backend.delete(["key"])
    with pytest.raises(StorageError, match="read-only"):
        LocalBackend(str(mounted / "step")).prepare()
    assert backend.read("key") == b"bytes"


def test_a_limit_on_the_size_of_files_is_reported(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StorageError, match=r"'data'.*ulimit"):
            backend.write("data", [memoryview(bytes(LARGE))], size=LARGE, exclusive=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_a_folder_without_permission_is_reported(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path / "closed"))
    backend.prepare()
    put(backend, "key", b"bytes")
    os.chmod(backend.url, 0o000)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        for attempt in (lambda: backend.publish("key", b"new"), lambda: backend.read("key"), backend.list_keys):
            with pytest.raises(StorageError, match="permission"):
                attempt()
    finally:
        if root:
            os.seteuid(0)
        os.chmod(backend.url, 0o755)


def test_a_file_in_the_place_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="is a file, not a folder"):
        LocalBackend(str(tmp_path / "file")).prepare()
    with pytest.raises(StorageError, match="is a file, not a folder"):
        LocalBackend(str(tmp_path / "file" / "below")).prepare()
    with pytest.raises(StorageError, match="is a file, not a folder"):
        LocalBackend(str(tmp_path / "file")).list_keys()


@pytest.mark.parametrize("write_threads", [0, 1, 3])
def test_a_failure_in_the_middle_stops_the_producer_and_removes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_threads: int
) -> None:
    backend = LocalBackend(str(tmp_path), write_threads=write_threads, block_bytes=1 << 20)
    write = os.pwritev
    asked: list[int] = []

    def fail_at_the_third_mebibyte(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 2 << 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(descriptor, buffers, offset)

    def pieces() -> Iterator[memoryview]:
        for number in range(LARGE >> 20):
            asked.append(number)
            yield memoryview(bytes(1 << 20))

    monkeypatch.setattr(os, "pwritev", fail_at_the_third_mebibyte)
    with pytest.raises(StorageError, match=r"'data'.*I/O error"):
        backend.write("data", pieces(), size=LARGE, exclusive=True)
    assert len(asked) <= 3 + 2 * write_threads + 1
    assert os.listdir(tmp_path) == []


def test_an_fsync_that_fails_is_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(str(tmp_path))
    put(backend, "key", b"old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="I/O error"):
        backend.publish("key", b"new")
    with pytest.raises(StorageError, match="I/O error"):
        backend.write("other", [memoryview(b"x")], size=1, exclusive=True)
    assert os.listdir(tmp_path) == ["key"]
    assert backend.read("key") == b"old"


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv

    def write_little(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return write(descriptor, [buffers[0][:7]], offset)

    def read_little(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return read(descriptor, [buffers[0][:5]], offset)

    monkeypatch.setattr(os, "pwritev", write_little)
    monkeypatch.setattr(os, "preadv", read_little)
    backend = LocalBackend(str(tmp_path))
    pieces = [bytes([number]) * (number % 17) for number in range(200)]
    backend.write("key", map(memoryview, pieces), size=sum(map(len, pieces)), exclusive=True)
    joined = b"".join(pieces)
    targets = [bytearray(len(piece)) for piece in pieces]
    offset, ranges = 0, []
    for piece in pieces:
        ranges.append(ByteRange(offset, len(piece)))
        offset += len(piece)
    backend.read_ranges("key", ranges, [memoryview(target) for target in targets])
    assert b"".join(targets) == joined


def test_a_file_cut_off_between_two_reads_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path))
    put(backend, "key", bytes(100_000))
    backend.read_ranges("key", [ByteRange(0, 10)], [memoryview(bytearray(10))])
    assert backend.map_range("key", ByteRange(90_000, 10_000)) == bytes(10_000)
    os.truncate(tmp_path / "key", 50_000)
    with pytest.raises(KeyTruncatedError, match=r"'key'.*50000.*100000"):
        backend.map_range("key", ByteRange(90_000, 10_000))
    with pytest.raises(KeyTruncatedError, match=r"'key'.*50000.*100000"):
        backend.read_ranges("key", [ByteRange(90_000, 10_000)], [memoryview(bytearray(10_000))])


def test_a_process_killed_while_publishing_leaves_old_or_new_bytes(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path))
    backend.publish("pointer", bytes(300_000))
    for delay in range(10):
        child = os.fork()
        if child == 0:
            try:
                for number in itertools.count(1):
                    backend.publish("pointer", bytes([number % 256]) * 300_000)
            finally:
                os._exit(1)
        time.sleep(delay / 300)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        data = backend.read("pointer")
        assert data == data[:1] * 300_000
        assert [info.key for info in backend.list_keys()] == ["pointer"]
    assert any(data), "no child came to publish anything"
