"""Where file systems of fsspec differ, and what they do wrong: uploads that fail, renames that do not, memory."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import hpdcp
from hpdcp._base import config
from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import InvalidArgumentError, KeyNotFoundError, NotSupportedError, StorageError
from hpdcp._plan.planner import PlannerContext
from hpdcp.testing._backend.base import put
from hpdcp_backends.generic import GenericBackend
from tests.support.proxy import Answer, CutAnswer, CutRequest, Rule, proxied
from tests.support.runs import begin_run
from tests.support.s3 import S3Server

MIB = 1 << 20


class Unknown(LocalFileSystem):  # type: ignore[misc]
    """Nobody has told hpdcp how this one replaces files."""

    protocol: ClassVar[str] = "unknownfs"


class Polite(Unknown):
    """Answers every rename with success, and does none over a file that is there, as HDFS does over HTTP."""

    protocol: ClassVar[str] = "politefs"

    def mv(self, path1: str, path2: str, **options: object) -> None:
        if not self.exists(path2):
            super().mv(path1, path2)


class Rude(Unknown):
    """Refuses to rename over a file, as SMB does."""

    protocol: ClassVar[str] = "rudefs"

    def mv(self, path1: str, path2: str, **options: object) -> None:
        if self.exists(path2):
            raise FileExistsError(17, "object name collision")
        super().mv(path1, path2)


class Short(MemoryFileSystem):  # type: ignore[misc]
    """Answers with less than it was asked for, as a proxy that lost its server does."""

    protocol: ClassVar[str] = "shortfs"
    store: ClassVar[dict[str, Any]] = {}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        data: bytes = super().cat_file(path, start=start, end=end)
        return data[:-1] if len(data) > 1 else data


class Restless(MemoryFileSystem):  # type: ignore[misc]
    """Another writer replaces the file once, after the first range was read."""

    protocol: ClassVar[str] = "restlessfs"
    store: ClassVar[dict[str, Any]] = {}
    left: ClassVar[int] = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        data: bytes = super().cat_file(path, start=start, end=end)
        if type(self).left:
            type(self).left -= 1
            self.pipe_file(path, b"n" * self.info(path)["size"])
        return data


class Leaking(MemoryFileSystem):  # type: ignore[misc]
    """Puts the password into its errors."""

    protocol: ClassVar[str] = "leakfs"

    def __init__(self, *, host: str = "", username: str = "", password: str = "", **options: object) -> None:
        super().__init__(**options)
        self._login = f"{username}:{password}@{host}"

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        options = fsspec.utils.infer_storage_options(path)
        return {name: options[name] for name in ("host", "username", "password")}

    def info(self, path: str, **options: object) -> dict[str, object]:
        raise PermissionError(13, f"login {self._login} was refused")


@pytest.fixture(scope="module", autouse=True)
def _known_to_fsspec() -> None:
    for kind in (Unknown, Polite, Rude, Short, Restless, Leaking):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)


@pytest.fixture
def memory() -> str:
    return f"memory://{uuid.uuid4().hex}/step"


# What it opens, and when


def test_nothing_is_opened_before_it_is_used(tmp_path: Path) -> None:
    script = """
import sys, threading
before = threading.active_count()
from hpdcp_backends.generic import GenericBackend
backend = GenericBackend("s3://bucket/run", storage_options={"anon": True})
import fsspec.asyn
assert fsspec.asyn.loop == [None] and fsspec.asyn.iothread == [None]
assert threading.active_count() == before
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_forked_child_opens_a_file_system_of_its_own(s3_server: S3Server) -> None:
    url, options = s3_server.new_prefix(), s3_server.storage_options()
    backend = GenericBackend(url, storage_options=options)
    put(backend, "key", b"bytes")
    script = f"""
import os
from hpdcp_backends.generic import GenericBackend
backend = GenericBackend({url!r}, storage_options={options!r})
assert backend.read("key") == b"bytes"
child = os.fork()
if not child:
    os._exit(0 if GenericBackend({url!r}, storage_options={options!r}).read("key") == b"bytes" else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    subprocess.run(command, check=True, timeout=60)


# Memory is this process's


def test_a_checkpoint_is_saved_to_memory_replaced_and_loaded(memory: str) -> None:
    for fill in (1.0, 2.0):
        metadata = hpdcp.save({"w": torch.full((3,), fill), "step": fill}, checkpoint_id=memory)
    target = {"w": torch.zeros(3), "step": 0.0}
    hpdcp.load(target, checkpoint_id=memory)
    assert torch.equal(target["w"], torch.full((3,), 2.0))
    assert target["step"] == 2.0
    keys = {info.key for info in GenericBackend(memory).list_keys(recursive=True)}
    assert keys == {".metadata", ".attempt", *metadata.files}


def test_a_background_save_to_memory_is_refused_at_the_call(memory: str) -> None:
    with pytest.raises(NotSupportedError, match=r"memory://.*another process"):
        hpdcp.async_save({"step": 1}, checkpoint_id=memory)
    assert GenericBackend(memory).list_keys() == []


@pytest.mark.parametrize("collective", [True, False])
def test_a_save_of_several_ranks_to_memory_is_refused(memory: str, collective: bool) -> None:
    writer = hpdcp.FileSystemWriter(memory)
    with pytest.raises(NotSupportedError, match="2 ranks"):
        writer.configure_writer(PlannerContext(0, 2, True, collective))
    writer.configure_writer(PlannerContext(0, 1, True, collective))


def test_a_load_of_several_ranks_from_memory_is_refused(memory: str) -> None:
    metadata = hpdcp.save({"step": 1}, checkpoint_id=memory)
    reader = hpdcp.FileSystemReader(memory)
    with pytest.raises(NotSupportedError, match="2 ranks"):
        reader.configure_reader(metadata, PlannerContext(1, 2, False, True))
    reader.configure_reader(metadata, PlannerContext(0, 1, True, True))


@pytest.mark.parametrize("backend", ["local", "fsspec"])
def test_saves_without_collectives_are_counted_alike_in_the_call_and_in_the_background(
    tmp_path: Path, backend: str
) -> None:
    begin_run()
    url = f"file://localhost{tmp_path}//run/"
    with config.using(backend=backend):
        first = hpdcp.save({"step": 1}, checkpoint_id=url, use_collectives=False)
        second = hpdcp.async_save({"step": 2}, checkpoint_id=url, use_collectives=False).get_result(120)
        third = hpdcp.save({"step": 3}, checkpoint_id=tmp_path / "run", use_collectives=False)
    assert [found.settings["ordinal"] for found in (first, second, third)] == ["1", "2", "3"]


# Replacing in one step, or not at all


def test_an_unknown_file_system_is_read_but_not_written_until_it_is_said_how(tmp_path: Path) -> None:
    url = f"unknownfs://{tmp_path}"
    (tmp_path / "key").write_bytes(b"there")
    backend = GenericBackend(url)
    assert backend.read("key") == b"there"
    for write in (backend.prepare, lambda: backend.publish("key", b"new"), lambda: put(backend, "key", b"new")):
        with pytest.raises(NotSupportedError, match=r"unknownfs://.*publish = \"rename\""):
            write()
    told = GenericBackend(url, publish="rename")
    told.publish("key", b"new")
    assert (tmp_path / "key").read_bytes() == b"new"
    with pytest.raises(NotSupportedError, match='publish = "put" is not right'):
        put(GenericBackend(url, publish="put", part_bytes=5 * MIB), "large", bytes(6 * MIB))


@pytest.mark.parametrize("protocol", ["politefs", "rudefs"])
def test_a_file_system_that_does_not_rename_over_files_says_so_and_keeps_the_old_bytes(
    tmp_path: Path, protocol: str
) -> None:
    backend = GenericBackend(f"{protocol}://{tmp_path}", publish="rename")
    backend.publish("key", b"old")
    for write in (lambda: backend.publish("key", b"new"), lambda: put(backend, "key", b"newer")):
        with pytest.raises(StorageError, match=r"cannot replace 'key'.*folder of its own"):
            write()
    assert backend.read("key") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_folder_in_the_way_is_an_error_and_stays_empty(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with pytest.raises(StorageError, match="a folder of that name"):
        GenericBackend(str(tmp_path)).publish("key", b"new")
    assert [path.name for path in tmp_path.rglob("*")] == ["key"]


def test_a_wrapper_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="simplecache"):
        GenericBackend("simplecache://bucket/x")


# Reading what does not hold still, or answers short


def test_an_answer_that_is_short_is_an_error_and_not_a_tail_of_zeros() -> None:
    backend = GenericBackend("shortfs://a/b", publish="put")
    put(backend, "key", bytes(100))
    into = memoryview(bytearray(50))
    with pytest.raises(StorageError, match="49 bytes where 0 to 50 were asked for"):
        backend.read_ranges("key", [ByteRange(0, 50)], [into])


def test_ranges_of_a_key_that_is_replaced_meanwhile_come_from_one_version() -> None:
    backend = GenericBackend("restlessfs://a/b", publish="put", max_read_bytes=10)
    put(backend, "key", b"o" * 100)
    target = bytearray(100)
    Restless.left = 1
    backend.read_ranges("key", [ByteRange(0, 100)], [memoryview(target)])
    assert target == b"n" * 100
    Restless.left = 10_000
    with pytest.raises(StorageError, match="replaced 10 times"):
        backend.read_ranges("key", [ByteRange(0, 100)], [memoryview(target)])
    Restless.left = 0


# Names and secrets


@pytest.mark.parametrize("name", ["a b", "h#1", "50%", "%20", "[1]", "*?", "a::b", "q?x=1", "ünï 日本"])
def test_a_root_may_be_called_anything(tmp_path: Path, name: str, memory: str) -> None:
    for url in (f"file://{tmp_path}/{name}", f"{memory}/{name}", f"memory://{name}"):
        backend = GenericBackend(url)
        backend.prepare()
        put(backend, "[k]*", b"bytes")
        assert [info.key for info in GenericBackend(url).list_keys()] == ["[k]*"]
        backend.delete(["[k]*"])
    assert (tmp_path / name).is_dir()


def test_a_password_is_in_no_message() -> None:
    backend = GenericBackend("leakfs://me:open%20sesame@host/run")
    with pytest.raises(StorageError, match=r"login me:\*\*\*@host was refused.*credentials") as caught:
        backend.read("key")
    assert backend.url == "leakfs://***@host/run"
    assert "sesame" not in f"{caught.value} {backend!r}"


# S3 by way of s3fs


def upload_to(backend: GenericBackend, nbytes: int) -> None:
    data = bytes(nbytes)
    backend.write("key", [memoryview(data)], size=nbytes, exclusive=False)


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
def test_an_upload_that_fails_is_given_up_and_leaves_the_old_object(s3_server: S3Server, operation: str) -> None:
    url = s3_server.new_prefix()
    put(GenericBackend(url, storage_options=s3_server.storage_options()), "key", b"old")
    with proxied(s3_server.url) as proxy:
        options = s3_server.through(proxy).storage_options()
        backend = GenericBackend(url, storage_options=options, part_bytes=5 * MIB)
        proxy.add(Rule(Answer(500), operation, skip=1 if operation == "UploadPart" else 0, times=None))
        with pytest.raises(StorageError, match=f"cannot write 'key' in {url}"):
            upload_to(backend, 12 * MIB)
        assert proxy.find("AbortMultipartUpload")
    assert s3_server.open_uploads(url) == []
    assert s3_server.objects(url) == {"key": 3}


def test_a_producer_that_fails_leaves_no_upload_open(s3_server: S3Server) -> None:
    url = s3_server.new_prefix()
    backend = GenericBackend(url, storage_options=s3_server.storage_options(), part_bytes=5 * MIB)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(6 * MIB))
        assert s3_server.open_uploads(url) == ["key"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.write("key", pieces(), size=12 * MIB, exclusive=False)
    assert s3_server.open_uploads(url) == []
    assert s3_server.objects(url) == {}


def test_connections_that_are_cut_are_tried_again(s3_server: S3Server) -> None:
    url = s3_server.new_prefix()
    with proxied(s3_server.url) as proxy:
        options = s3_server.through(proxy).storage_options()
        backend = GenericBackend(url, storage_options=options, part_bytes=5 * MIB, max_read_bytes=MIB)
        cut_part = proxy.add(Rule(CutRequest(after=MIB), "UploadPart", skip=1))
        upload_to(backend, 12 * MIB)
        cut_read = proxy.add(Rule(CutAnswer(after=1000), "GetObject", skip=3))
        target = memoryview(bytearray(b"x" * (12 * MIB)))
        backend.read_ranges("key", [ByteRange(0, 12 * MIB)], [target])
        assert target == bytes(12 * MIB)
        assert (cut_part.hits, cut_read.hits) == (1, 1)
        assert len(proxy.find("GetObject")) == 13


def test_a_checkpoint_on_s3_is_saved_replaced_and_loaded(s3_server: S3Server) -> None:
    url = s3_server.new_prefix()
    with config.using(backend="fsspec", backends={"fsspec": {"storage_options": s3_server.storage_options()}}):
        for fill in (1.0, 2.0):
            metadata = hpdcp.save({"w": torch.full((3,), fill), "step": fill}, checkpoint_id=url)
        metadata = hpdcp.async_save({"w": torch.full((3,), 3.0), "step": 3.0}, checkpoint_id=url).get_result(120)
        target = {"w": torch.zeros(3), "step": 0.0}
        hpdcp.load(target, checkpoint_id=url)
    assert torch.equal(target["w"], torch.full((3,), 3.0))
    assert target["step"] == 3.0
    assert set(s3_server.objects(url)) == {".metadata", ".attempt", *metadata.files}


def test_wrong_keys_and_missing_buckets_are_named_and_no_secret_is(s3_server: S3Server) -> None:
    wrong = GenericBackend(s3_server.new_prefix(), storage_options=s3_server.storage_options(secret="open-sesame"))
    with pytest.raises(StorageError, match=r"cannot write 'key' in s3://.*credentials") as caught:
        put(wrong, "key", b"bytes")
    assert "sesame" not in str(caught.value)
    nowhere = GenericBackend("s3://no-such-bucket-here/x", storage_options=s3_server.storage_options())
    with pytest.raises(StorageError, match=r"cannot write 'key' in s3://no-such-bucket-here/x.*Is the bucket"):
        put(nowhere, "key", b"bytes")
    with pytest.raises(KeyNotFoundError, match="no-such-bucket-here"):
        nowhere.read("key")
