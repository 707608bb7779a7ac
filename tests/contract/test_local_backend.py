"""The local backend keeps the contract, and takes folders as people write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CheckpointNotFoundError, InvalidArgumentError, StorageError
from hpdcp.testing import BackendContract
from hpdcp.testing._backend.base import LARGE, put
from hpdcp_backends.local import LocalBackend


class TestLocalBackend(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        backend = LocalBackend(str(tmp_path / "root"))
        backend.prepare()
        return backend

    def reopen(self, backend: Backend) -> Backend:
        return LocalBackend(backend.url)


class TestLocalBackendWithOneCore(TestLocalBackend):
    """Where ranks outnumber cores: no thread but the caller's."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        backend = LocalBackend(str(tmp_path / "root"), write_threads=0, read_threads=1, block_bytes=1 << 20)
        backend.prepare()
        return backend


class TestLocalBackendWithManyThreads(TestLocalBackend):
    """As on a parallel file system: batches finish in any order."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        backend = LocalBackend(str(tmp_path / "root"), write_threads=3, read_threads=4, block_bytes=1 << 20)
        backend.prepare()
        return backend


@pytest.mark.parametrize(
    "name", ["with space", "hash#tag", "%20", "layers[1]", "a::b", "*?", "日本", "back\\slash", "-"]
)
def test_a_folder_may_be_called_anything(tmp_path: Path, name: str) -> None:
    for url in (str(tmp_path / name), f"file://{tmp_path}/{name}"):
        backend = LocalBackend(url)
        backend.prepare()
        backend.publish("key", b"bytes")
        assert backend.url == str(tmp_path / name)
        assert (tmp_path / name / "key").read_bytes() == b"bytes"


def test_a_relative_path_is_resolved_when_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend("run/../step_1/")
    monkeypatch.chdir("/")
    backend.prepare()
    assert backend.url == str(tmp_path / "step_1")
    assert (tmp_path / "step_1").is_dir()


def test_dots_after_a_symbolic_link_go_where_the_system_goes(tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    assert LocalBackend(f"{tmp_path}/link/../step").url == str(tmp_path / "far" / "step")
    assert LocalBackend(f"{tmp_path}/link/step").url == str(tmp_path / "link" / "step")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LocalBackend("~/ckpt").url == str(tmp_path / "ckpt")
    assert LocalBackend("file://~/ckpt").url == str(tmp_path / "ckpt")
    assert LocalBackend("file://localhost/ckpt").url == "/ckpt"


@pytest.mark.parametrize("url", ["", "file://", "s3://bucket/key", "memory://x", "file://host/share", "nul\0"])
def test_what_is_not_a_local_folder_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        LocalBackend(url)


def test_options_that_mean_nothing_here_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="endpoint_url"):
        LocalBackend(str(tmp_path), storage_options={"endpoint_url": "http://host"})
    with pytest.raises(InvalidArgumentError, match="read_threads is 0"):
        LocalBackend(str(tmp_path), read_threads=0)


def test_threads_are_shared_among_the_ranks_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert LocalBackend(str(tmp_path)).write_window == 8 << 20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert LocalBackend(str(tmp_path)).write_window == 3 * (8 << 20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with pytest.raises(InvalidArgumentError, match="LOCAL_WORLD_SIZE"):
        LocalBackend(str(tmp_path))


def test_a_folder_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path / "missing"))
    with pytest.raises(CheckpointNotFoundError, match="missing"):
        backend.list_keys()
    with pytest.raises(StorageError, match="prepare"):
        backend.publish("key", b"")
    with pytest.raises(StorageError, match="prepare"):
        put(backend, "folder/key", b"")
    assert not (tmp_path / "missing").exists()


def test_a_listing_shows_files_and_nothing_else(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path / "root"))
    backend.prepare()
    put(backend, "file", b"1")
    (tmp_path / "elsewhere").write_bytes(b"22")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "broken").symlink_to(tmp_path / "gone")
    (tmp_path / "root" / "loop").symlink_to(tmp_path / "root")
    (tmp_path / "root" / ".hpdcp-tmp-0123").write_bytes(b"left by a killed process")
    (tmp_path / "root" / "folder").mkdir()
    os.mkfifo(tmp_path / "root" / "pipe")
    (tmp_path / "root" / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"")
    assert [(info.key, info.size) for info in backend.list_keys(recursive=True)] == [("file", 1), ("link", 2)]
    assert backend.read("link") == b"22"
    for other in ("folder", "pipe"):
        with pytest.raises(StorageError, match=other):
            backend.read(other)
        with pytest.raises(StorageError, match=other):
            backend.size(other)
        with pytest.raises(StorageError, match=other):
            backend.read_ranges(other, [ByteRange(0, 1)], [memoryview(bytearray(1))])


def test_a_file_that_is_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path / "root"))
    backend.prepare()
    (tmp_path / "outside").write_bytes(b"mine")
    (tmp_path / "root" / "key").symlink_to(tmp_path / "outside")
    with pytest.raises(FileExistsError):
        backend.write("key", [memoryview(b"x")], size=1, exclusive=True)
    backend.publish("key", b"new")
    assert (tmp_path / "outside").read_bytes() == b"mine"
    assert backend.read("key") == b"new"


def test_files_get_the_permissions_the_user_asks_for(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path))
    before = os.umask(0o027)
    try:
        backend.write("data", [memoryview(bytes(LARGE))], size=LARGE, exclusive=True)
        backend.publish("pointer", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "pointer").stat().st_mode & 0o777 == 0o640
