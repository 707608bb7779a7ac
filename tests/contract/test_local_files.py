"""How the local backend treats its files: durable, few of them open, none shared with a forked child."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpdcp._base.backend import ByteRange
from hpdcp.testing._backend.base import LARGE, put
from hpdcp_backends.local import LocalBackend


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(str(tmp_path))


def open_files(folder: Path) -> list[str]:
    """Names of the files under `folder` that this process holds open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith(f"{folder}/"):
            found.append(target.removeprefix(f"{folder}/"))
    return found


class Recorder:
    """Notes, in order, what is synced and renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.steps: list[str] = []
        fsync, replace = os.fsync, os.replace

        def record_fsync(descriptor: int) -> None:
            target = os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(root)) or "/"
            self.steps.append("sync temporary" if "hpdcp-tmp" in target else f"sync {target}")
            fsync(descriptor)

        def record_replace(source: str, target: str) -> None:
            self.steps.append(f"rename to {target.removeprefix(str(root))}")
            replace(source, target)

        monkeypatch.setattr(os, "fsync", record_fsync)
        monkeypatch.setattr(os, "replace", record_replace)


def test_a_file_is_durable_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Recorder(monkeypatch, tmp_path).steps
    LocalBackend(f"{tmp_path}/run/step").prepare()
    assert steps == ["sync /", "sync /run"]
    steps.clear()
    backend = LocalBackend(f"{tmp_path}/run/step")
    backend.prepare()
    backend.write("data", [memoryview(b"x")], size=1, exclusive=True)
    assert steps == ["sync /run/step/data", "sync /run/step"]
    steps.clear()
    backend.publish("pointer", b"x")
    assert steps == ["sync temporary", "rename to /run/step/pointer", "sync /run/step"]
    steps.clear()
    put(backend, "a/b/key", b"x")
    assert steps == [
        "sync /run/step",
        "sync /run/step/a",
        "sync temporary",
        "rename to /run/step/a/b/key",
        "sync /run/step/a/b",
    ]
    steps.clear()
    backend.delete(["a/b/key", "pointer", "data"])
    assert steps == ["sync /run/step"]  # a/b and a went with their last key


def test_at_most_eight_files_stay_open(backend: LocalBackend, tmp_path: Path) -> None:
    target = memoryview(bytearray(3))
    for number in range(20):
        put(backend, f"key-{number}", b"abc")
        backend.read_ranges(f"key-{number}", [ByteRange(0, 3)], [target])
    assert sorted(open_files(tmp_path)) == sorted(f"key-{number}" for number in range(12, 20))
    backend.read_ranges("key-12", [ByteRange(0, 3)], [target])
    put(backend, "key-20", b"abc")
    backend.read_ranges("key-20", [ByteRange(0, 3)], [target])
    assert "key-12" in open_files(tmp_path)
    assert "key-13" not in open_files(tmp_path)
    backend.close()
    assert open_files(tmp_path) == []


def test_a_mapping_is_gone_with_the_last_view_of_it(backend: LocalBackend, tmp_path: Path) -> None:
    put(backend, "key", b"abc")
    view = backend.map_range("key", ByteRange(1, 2))
    backend.close()
    assert bytes(view) == b"bc"
    del view
    assert open_files(tmp_path) == []


def test_a_deleted_file_gives_its_space_back(backend: LocalBackend, tmp_path: Path) -> None:
    put(backend, "key", b"abc")
    backend.read_ranges("key", [ByteRange(0, 3)], [memoryview(bytearray(3))])
    backend.delete(["key"])
    assert open_files(tmp_path) == []


def test_no_file_is_left_open_by_a_failure(backend: LocalBackend, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        backend.write("key", (memoryview(bytes(1 // zero)) for zero in (1, 0)), size=5, exclusive=True)
    assert open_files(tmp_path) == []
    assert os.listdir(tmp_path) == []


def test_a_view_keeps_its_bytes_when_the_file_is_replaced(backend: LocalBackend) -> None:
    put(backend, "key", b"old bytes")
    view = backend.map_range("key", ByteRange(0, 9))
    backend.publish("key", b"new bytes")
    assert bytes(view) == b"old bytes"
    assert bytes(backend.map_range("key", ByteRange(0, 9))) == b"new bytes"


def test_a_forked_child_reads_with_files_of_its_own(backend: LocalBackend) -> None:
    put(backend, "key", bytes(LARGE))
    target = memoryview(bytearray(LARGE))
    backend.read_ranges("key", [ByteRange(0, LARGE)], [target])
    # The moment that breaks a child which trusts what it inherits: another thread holds the lock.
    backend._files._lock.acquire()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            target[:] = b"\1" * LARGE
            backend.read_ranges("key", [ByteRange(0, LARGE)], [target])
            put(backend, "from the child", bytes(LARGE))
            code = int(any(target[::4096]))
        finally:
            os._exit(code)
    backend._files._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert backend.size("from the child") == LARGE
    backend.read_ranges("key", [ByteRange(0, LARGE)], [target])


def test_no_thread_outlives_a_call(backend: LocalBackend, tmp_path: Path) -> None:
    busy = LocalBackend(str(tmp_path), write_threads=3, read_threads=4, block_bytes=1 << 20)
    put(busy, "key", bytes(LARGE))
    busy.read_ranges("key", [ByteRange(0, LARGE)], [memoryview(bytearray(LARGE))])
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("hpdcp")] == []


def test_where_the_system_gives_no_threads_the_caller_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    backend = LocalBackend(str(tmp_path), write_threads=2, read_threads=4)
    data = os.urandom(LARGE)
    put(backend, "key", data)
    target = bytearray(LARGE)
    backend.read_ranges("key", [ByteRange(0, LARGE)], [memoryview(target)])
    assert target == data


def test_a_folder_goes_with_its_last_key_and_the_root_stays(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path / "root"))
    backend.prepare()
    (tmp_path / "root" / "theirs").mkdir()
    for key in ("mail/one", "mail/two", "top"):
        backend.publish(key, b"x")
    backend.delete(["mail/one"])
    assert (tmp_path / "root" / "mail").is_dir()
    backend.delete(["mail/two", "top"])
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["theirs"]


def test_all_folders_that_a_removal_leaves_empty_are_gone(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path / "root"))
    backend.prepare()
    for key in ("a/b/c/0", "a/b/c/1/2", "d/e/0", "d/f"):
        backend.write(key, [memoryview(b"x")], size=1, exclusive=False)
    backend.delete(["a/b/c/0", "a/b/c/1/2", "d/e/0"])
    assert sorted(path.name for path in (tmp_path / "root").rglob("*")) == ["d", "f"]
    backend.delete(["d/f"])
    assert list((tmp_path / "root").iterdir()) == []
