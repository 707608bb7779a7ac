"""What the NFS backend does on any file system; its promises between hosts are kept in `tests/nfs`, on a real one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import InvalidArgumentError, KeyNotFoundError, StorageError
from hpdcp.testing import BackendContract
from hpdcp.testing._backend.base import LARGE, put
from hpdcp_backends.nfs import NfsBackend


class TestNfsBackendOnALocalFolder(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> NfsBackend:
        backend = NfsBackend(str(tmp_path / "root"))
        backend.prepare()
        return backend

    def reopen(self, backend: Backend) -> Backend:
        return NfsBackend(backend.url)


@pytest.fixture
def backend(tmp_path: Path) -> NfsBackend:
    backend = NfsBackend(str(tmp_path / "root"))
    backend.prepare()
    return backend


def test_nothing_is_mapped_and_nothing_stays_open(backend: NfsBackend) -> None:
    before = set(os.listdir("/proc/self/fd"))
    put(backend, "folder/key", bytes(LARGE))
    backend.read_ranges("folder/key", [ByteRange(0, LARGE)], [memoryview(bytearray(LARGE))])
    backend.read("folder/key")
    backend.size("folder/key")
    backend.list_keys(recursive=True)
    with pytest.raises(KeyNotFoundError):
        backend.read("folder/none")
    assert backend.map_range("folder/key", ByteRange(0, 10)) is None
    backend.delete(["folder/key"])
    assert set(os.listdir("/proc/self/fd")) == before


def test_files_deleted_while_open_are_no_keys_and_others_like_them_are(backend: NfsBackend) -> None:
    root = Path(backend.url)
    (root / ".nfs000000000003f2a100000001").touch()
    keys = [".nfs", ".nfs-notes", ".nfs0000", "a.nfs000000000003f2a100000001"]
    for key in keys:
        put(backend, key, b"x")
    assert [info.key for info in backend.list_keys()] == keys


def test_a_folder_of_files_that_are_still_read_is_left(backend: NfsBackend) -> None:
    put(backend, "folder/key", b"x")
    (Path(backend.url) / "folder" / ".nfs000000000003f2a100000001").touch()
    backend.delete(["folder/key"])
    assert os.listdir(Path(backend.url) / "folder") == [".nfs000000000003f2a100000001"]
    assert backend.list_keys(recursive=True) == []


@pytest.mark.parametrize("options", [{"server": "host"}, {"addr": "1"}])
def test_options_that_mean_nothing_here_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match="'nfs' takes no storage_options"):
        NfsBackend(str(tmp_path), storage_options=options)
    with pytest.raises(InvalidArgumentError, match="read_threads is 0"):
        NfsBackend(str(tmp_path), read_threads=0)


def failing(monkeypatch: pytest.MonkeyPatch, function: str, error: int, times: int, *, like: str) -> list[str]:
    """Let the first calls of `os.function` on such paths, or on such descriptors' files, fail with `error`."""
    real: Callable[..., object] = getattr(os, function)
    calls: list[str] = []

    def fail(*arguments: object, **options: object) -> object:
        first = arguments[0]
        name = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if like in name:
            calls.append(name)
            if len(calls) <= times:
                raise OSError(error, os.strerror(error))
        return real(*arguments, **options)

    monkeypatch.setattr(os, function, fail)
    return calls


@pytest.mark.parametrize("function", ["open", "preadv"])
def test_a_read_starts_over_when_the_server_has_forgotten_the_file(
    backend: NfsBackend, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    data = os.urandom(LARGE)
    put(backend, "key", data)
    calls = failing(monkeypatch, function, errno.ESTALE, 3, like="/key")
    target = bytearray(LARGE)
    backend.read_ranges("key", [ByteRange(0, LARGE)], [memoryview(target)])
    assert target == data
    assert len(calls) > 3


def test_a_file_that_is_forgotten_again_and_again_is_an_error_that_names_it(
    backend: NfsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, "key", b"data")
    failing(monkeypatch, "open", errno.ESTALE, 1000, like="/key")
    with pytest.raises(StorageError, match=r"'key' in .*: Stale file handle. The server no longer knows the file") as e:
        backend.read("key")
    assert e.value.errno == errno.ESTALE


@pytest.mark.parametrize("function", ["fsync", "close"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_what_only_fsync_or_close_reports_is_raised_and_leaves_nothing(
    backend: NfsBackend, monkeypatch: pytest.MonkeyPatch, function: str, error: int
) -> None:
    put(backend, "key", b"old")
    with monkeypatch.context() as patched:
        failing(patched, function, error, 1, like="/.hpdcp-tmp-")
        with pytest.raises(StorageError, match=rf"cannot write 'key' in .*{os.strerror(error)}") as caught:
            put(backend, "key", b"new")
        assert caught.value.errno == error
    with monkeypatch.context() as patched:
        failing(patched, function, error, 1, like="/other")
        with pytest.raises(StorageError, match=rf"cannot write 'other' in .*{os.strerror(error)}"):
            backend.write("other", [memoryview(b"new")], size=3, exclusive=True)
    assert backend.read("key") == b"old"
    assert os.listdir(backend.url) == ["key"]


def test_the_producers_own_error_is_told_and_not_what_close_makes_of_it(
    backend: NfsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces() -> list[memoryview]:
        raise RuntimeError("the producer's own error")

    failing(monkeypatch, "close", errno.EIO, 1, like="/.hpdcp-tmp-")
    with pytest.raises(RuntimeError, match="the producer's own error"):
        backend.write("key", (piece for _ in range(1) for piece in pieces()), size=3, exclusive=False)
    assert os.listdir(backend.url) == []


def test_a_rename_whose_answer_was_lost_counts_as_done(backend: NfsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(source: str, target: str) -> None:
        real(source, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)

    monkeypatch.setattr(os, "replace", replace)
    backend.publish("key", b"new")
    assert backend.read("key") == b"new"

    def vanish(source: str, target: str) -> None:
        os.unlink(source)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)

    monkeypatch.setattr(os, "replace", vanish)
    with pytest.raises(StorageError, match="'key'"):
        backend.publish("key", b"newer")
    assert backend.read("key") == b"new"
