"""What is S3's own: uploads in parts, versions of an object, markers of folders, pages, names that XML cannot hold."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import InvalidArgumentError, KeyChangedError, KeyNotFoundError, KeyTruncatedError, StorageError
from hpdcp._format.metadata import Metadata
from hpdcp_backends._s3.errors import answered
from hpdcp_backends.s3 import S3Backend
from tests.support.proxy import Do, LoseAnswer, Proxy, Rule, Slow, Stall
from tests.support.s3 import S3Server

MIB = 1 << 20
ENGINES = ["obstore", "botocore"]
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture
def url(s3_server: S3Server) -> str:
    return s3_server.new_prefix()


def open_backend(server: S3Server, url: str, *, engine: str = "auto", **options: object) -> S3Backend:
    return S3Backend(
        url,
        storage_options=server.storage_options(**options),
        engine=engine,
        part_bytes=5 * MIB,
        put_below=5 * MIB,
        write_in_flight=3,
        max_read_bytes=MIB,
    )


def pieces(size: int, step: int) -> Iterator[memoryview]:
    for start in range(0, size, step):
        yield memoryview(bytes([start // step % 251]) * min(step, size - start))


# Uploads


def test_parts_are_equal_and_hold_small_and_large_buffers_in_order(
    s3_server: S3Server, s3_proxy: Proxy, url: str
) -> None:
    buffers = [*pieces(6 * MIB, 100_003), memoryview(os.urandom(9 * MIB)), memoryview(b""), *pieces(MIB, 300_000)]
    expected = b"".join(buffers)
    with open_backend(s3_server.through(s3_proxy), url) as backend:
        backend.write("key", iter(buffers), size=len(expected), exclusive=False)
        assert backend.read("key") == expected
    # The counts include the framing of HTTP, if any.
    assert [request.received // MIB for request in s3_proxy.find("UploadPart")].count(5) == 3
    assert len(s3_proxy.find("UploadPart")) == 4


def test_a_small_object_is_one_request(s3_server: S3Server, s3_proxy: Proxy, url: str) -> None:
    with open_backend(s3_server.through(s3_proxy), url) as backend:
        backend.write("key", pieces(4 * MIB, MIB), size=4 * MIB, exclusive=False)
    assert [request.operation for request in s3_proxy.requests] == ["PutObject"]


def test_an_interrupt_in_the_midst_of_an_upload_leaves_nothing(s3_server: S3Server, s3_proxy: Proxy, url: str) -> None:
    s3_proxy.add(Rule(Slow(2 * MIB), "UploadPart", times=None))
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    with open_backend(s3_server.through(s3_proxy), url) as backend:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            backend.write("key", pieces(30 * MIB, MIB), size=30 * MIB, exclusive=False)
        timer.join()
    assert s3_server.objects(url) == {}
    assert s3_server.open_uploads(url) == []


def test_an_upload_whose_begin_is_interrupted_or_never_answered_does_not_stay(
    s3_server: S3Server, s3_proxy: Proxy, url: str
) -> None:
    create = "CreateMultipartUpload"
    options = s3_server.through(s3_proxy).storage_options()
    with S3Backend(url, storage_options=options, put_below=MIB, retries=2) as backend:
        s3_proxy.add(Rule(Stall(1.5), create))
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            backend.write("key", pieces(6 * MIB, MIB), size=6 * MIB, exclusive=False)
        timer.join()
        assert s3_server.open_uploads(url) == []
        s3_proxy.reset()
        s3_proxy.add(Rule(LoseAnswer(), create, times=None))
        with pytest.raises(StorageError, match="key"):
            backend.write("key", pieces(6 * MIB, MIB), size=6 * MIB, exclusive=False)
        assert len(s3_proxy.find(create)) == 3
    assert s3_server.open_uploads(url) == []
    assert s3_server.objects(url) == {}


def test_an_interrupt_of_a_single_request_leaves_nothing(s3_server: S3Server, s3_proxy: Proxy, url: str) -> None:
    s3_proxy.add(Rule(Slow(4 * MIB), "PutObject", times=None))
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    options = s3_server.through(s3_proxy).storage_options()
    # Far more than the buffers between here and the server hold: what these hold cannot be called back.
    with S3Backend(url, storage_options=options) as backend:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            backend.write("key", pieces(40 * MIB, MIB), size=40 * MIB, exclusive=False)
        timer.join()
    assert s3_server.objects(url) == {}


@pytest.mark.parametrize("announced", [11 * MIB, 13 * MIB])
def test_a_wrong_total_of_a_large_object_aborts_its_upload(s3_server: S3Server, url: str, announced: int) -> None:
    with open_backend(s3_server, url) as backend:
        backend.write("key", pieces(6 * MIB, MIB), size=6 * MIB, exclusive=False)
        with pytest.raises(InvalidArgumentError, match="key"):
            backend.write("key", pieces(12 * MIB, MIB), size=announced, exclusive=False)
    assert s3_server.objects(url) == {"key": 6 * MIB}
    assert s3_server.open_uploads(url) == []


def test_a_body_changed_on_its_way_is_refused_by_the_server(
    s3_server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpdcp_backends._s3.body import Body

    monkeypatch.setattr(Body, "crc32c", lambda self: "AAAAAA==")
    with (
        S3Backend(url, storage_options=s3_server.storage_options(), retries=0) as backend,
        pytest.raises(StorageError, match="key"),
    ):
        backend.publish("key", b"data")
    assert s3_server.objects(url) == {}


@pytest.mark.parametrize("mode", ["when_supported", "when_required"])
@pytest.mark.parametrize("secure", [True, False])
def test_checksums_are_stored_unless_they_are_turned_off(
    s3_server: S3Server, url: str, mode: str, secure: bool
) -> None:
    if secure and s3_server.https_url is None:
        pytest.skip("the server has no certificate: openssl is not installed")
    address = {"endpoint_url": s3_server.https_url, "verify": s3_server.ca} if secure else {}
    options = s3_server.storage_options(config_kwargs={"request_checksum_calculation": mode})
    options["client_kwargs"] |= address
    data = os.urandom(12 * MIB)
    with S3Backend(url, storage_options=options, part_bytes=5 * MIB, put_below=5 * MIB) as backend:
        backend.write("large", [memoryview(data)], size=len(data), exclusive=False)
        backend.publish("small", data[:1000])
        assert backend.read("large") == data
    with contextlib.closing(s3_server.client()) as client:
        name = f"{url.rpartition('/')[2]}/small"
        head = client.head_object(Bucket=s3_server.bucket, Key=name, ChecksumMode="ENABLED")
    assert ("ChecksumCRC32C" in head) is (mode == "when_supported")


def test_additional_parameters_and_the_users_metadata_go_with_an_upload(s3_server: S3Server, url: str) -> None:
    additional = {"Metadata": {"owner": "somebody"}, "ContentType": "application/x-tensors"}
    with open_backend(s3_server, url, s3_additional_kwargs=additional) as backend:
        backend.write("large", pieces(6 * MIB, MIB), size=6 * MIB, exclusive=False)
        backend.publish("small", b"x")
        assert backend.read("small") == b"x"
    with contextlib.closing(s3_server.client()) as client:
        for key in ("large", "small"):
            head = client.head_object(Bucket=s3_server.bucket, Key=f"{url.rpartition('/')[2]}/{key}")
            assert head["ContentType"] == "application/x-tensors"
            assert head["Metadata"]["owner"] == "somebody"


# Reading


@engines
def test_all_ranges_are_of_one_version_when_the_key_is_replaced_between_requests(
    s3_server: S3Server, s3_proxy: Proxy, url: str, engine: str
) -> None:
    with (
        open_backend(s3_server, url) as writer,
        open_backend(s3_server.through(s3_proxy), url, engine=engine) as reader,
    ):
        writer.publish("key", b"o" * 4 * MIB)
        s3_proxy.add(Rule(Do(lambda: writer.publish("key", b"n" * 4 * MIB)), "GetObject", skip=2))
        target = memoryview(bytearray(4 * MIB))
        reader.read_ranges("key", [ByteRange(0, 4 * MIB)], [target])
    assert target in (b"o" * 4 * MIB, b"n" * 4 * MIB)


@engines
def test_a_key_that_is_replaced_all_the_time_is_told_so(
    s3_server: S3Server, s3_proxy: Proxy, url: str, engine: str
) -> None:
    count = iter(range(1000))
    with (
        open_backend(s3_server, url) as writer,
        open_backend(s3_server.through(s3_proxy), url, engine=engine) as reader,
    ):
        writer.publish("key", bytes(4 * MIB))
        again = Do(lambda: writer.publish("key", bytes([next(count) % 251]) * (4 * MIB)))
        s3_proxy.add(Rule(again, "GetObject", times=None))
        with pytest.raises(StorageError, match=r"'key' .* was replaced"):
            reader.read_ranges("key", [ByteRange(0, 4 * MIB)], [memoryview(bytearray(4 * MIB))])


@engines
def test_ranges_of_a_key_that_is_not_there_and_empty_ones_of_one_that_is(
    s3_server: S3Server, url: str, engine: str
) -> None:
    with open_backend(s3_server, url, engine=engine) as backend:
        backend.publish("key", b"0123456789")
        backend.read_ranges("key", [ByteRange(10, 0)], [memoryview(bytearray(0))])
        backend.read_ranges("key", [], [])
        for length in (0, 1):
            with pytest.raises(KeyNotFoundError, match="gone"):
                backend.read_ranges("gone", [ByteRange(0, length)], [memoryview(bytearray(length))])


@engines
def test_names_with_control_characters_can_be_stored_read_listed_and_deleted(
    s3_server: S3Server, url: str, engine: str
) -> None:
    names = ["tab\there", "line\nbreak", "bell\x07", "delete\x7f"]
    with open_backend(s3_server, url, engine=engine) as backend:
        for name in names:
            backend.publish(name, name.encode())
        for name in names:
            target = bytearray(len(name))
            backend.read_ranges(name, [ByteRange(0, len(name))], [memoryview(target)])
            assert target == name.encode()
        assert [info.key for info in backend.list_keys()] == sorted(names)
        backend.delete(names)
        assert backend.list_keys() == []


@engines
def test_nothing_is_written_into_the_buffers_after_an_interrupted_read(
    s3_server: S3Server, s3_proxy: Proxy, url: str, engine: str
) -> None:
    target = memoryview(bytearray(40 * MIB))
    with open_backend(s3_server.through(s3_proxy), url, engine=engine) as backend:
        backend.publish("key", b"x" * len(target))
        s3_proxy.add(Rule(Slow(MIB), "GetObject", times=None))
        timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            backend.read_ranges("key", [ByteRange(0, len(target))], [target])
        timer.join()
        seen = bytes(target)
        time.sleep(1.5)
        assert target == seen
        assert seen != b"x" * len(target)


@engines
def test_one_range_that_fails_ends_the_others(s3_server: S3Server, s3_proxy: Proxy, url: str, engine: str) -> None:
    target = memoryview(bytearray(64 * MIB))
    with open_backend(s3_server.through(s3_proxy), url, engine=engine) as backend:
        backend.publish("key", bytes(4 * MIB))
        s3_proxy.reset()
        with pytest.raises(KeyTruncatedError, match=str(4 * MIB)):
            backend.read_ranges("key", [ByteRange(0, len(target))], [target])
        # 64 ranges were asked for, of which the last 60 are beyond the end.
        assert len(s3_proxy.find("GetObject")) < 64


# Listing and deleting


def test_listings_have_pages_and_deletions_have_batches(s3_server: S3Server, s3_proxy: Proxy, url: str) -> None:
    names = [f"{number:04}" for number in range(1002)]
    with open_backend(s3_server, url) as backend, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: backend.publish(name, b""), names))
    with open_backend(s3_server.through(s3_proxy), url) as backend:
        assert [info.key for info in backend.list_keys()] == names
        backend.delete([*names, "never there"])
        assert backend.list_keys(recursive=True) == []
    assert len(s3_proxy.find("DeleteObjects")) == 2


def test_markers_of_folders_are_no_keys(s3_server: S3Server, url: str) -> None:
    prefix = url.rpartition("/")[2]
    with contextlib.closing(s3_server.client()) as client:
        for marker in (f"{prefix}/", f"{prefix}/folder/"):
            client.put_object(Bucket=s3_server.bucket, Key=marker, Body=b"")
    with open_backend(s3_server, url) as backend:
        assert backend.list_keys() == []
        backend.publish("folder/key", b"x")
        assert backend.list_keys() == []
        assert [info.key for info in backend.list_keys(recursive=True)] == ["folder/key"]
        assert [info.key for info in backend.list_keys("folder")] == ["folder/key"]


def test_a_prefix_that_begins_like_another_is_not_part_of_it(s3_server: S3Server, url: str) -> None:
    with open_backend(s3_server, url) as backend, open_backend(s3_server, f"{url}-2/") as neighbour:
        neighbour.publish("key", b"x")
        assert backend.list_keys(recursive=True) == []
        assert neighbour.url == f"{url}-2"


# Processes


def test_a_child_forked_from_a_process_that_used_obstore_reads_with_botocore(
    s3_server: S3Server, tmp_path: Path
) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        textwrap.dedent(
            """
            import logging, os, signal, sys
            from hpdcp._base.backend import ByteRange
            from hpdcp._base.errors import NotSupportedError
            from hpdcp_backends.s3 import S3Backend

            def read(engine):
                target = bytearray(4)
                with S3Backend(sys.argv[1], engine=engine) as backend:
                    backend.publish("key", b"data")
                    backend.read_ranges("key", [ByteRange(0, 4)], [memoryview(target)])
                    backend.write("big", [memoryview(bytes(70 << 20))], size=70 << 20, exclusive=False)
                assert target == b"data"

            read("obstore")
            child = os.fork()
            if not child:
                signal.alarm(60)
                read("auto")
                try:
                    read("obstore")
                except NotSupportedError as error:
                    assert "forked" in str(error)
                    os._exit(7)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            """
        )
    )
    environment = os.environ | s3_server.environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, str(script), s3_server.new_prefix()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_process_that_ends_saves_and_removes_all_the_same(s3_server: S3Server, url: str) -> None:
    program = """
        import atexit, sys
        import torch
        import hpdcp
        from hpdcp._files.registry import open_backend

        def save_at_the_end():
            for step in (1, 2):
                hpdcp.save({"w": torch.full((2 << 20,), step), "step": step}, checkpoint_id=sys.argv[1])
            with open_backend(sys.argv[1]) as backend:
                backend.delete(["a", "b"])

        atexit.register(save_at_the_end)
    """
    small = {"HPDCP_BACKENDS__S3__PUT_BELOW": "5MiB", "HPDCP_BACKENDS__S3__PART_BYTES": "5MiB"}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), url],
        env={**os.environ, **s3_server.environment(), **small},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stderr == ""
    with open_backend(s3_server, url) as backend:
        found = Metadata.from_bytes(backend.read(".metadata"), where=url)
        assert {info.key for info in backend.list_keys()} == {".metadata", ".attempt", *found.files}


def test_a_backend_that_nobody_closed_leaves_no_connection_though_garbage_is_not_collected(
    s3_server: S3Server, url: str
) -> None:
    def sockets() -> int:
        names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(os.readlink(name).startswith("socket:") for name in names if os.path.lexists(name))

    def use() -> None:
        backend = open_backend(s3_server, url, engine="botocore")
        backend.publish("key", bytes(100))
        assert backend.size("key") == 100

    use()
    gc.collect()
    gc.disable()
    try:
        before = sockets()
        for _ in range(3):
            use()
        assert sockets() <= before
    finally:
        gc.enable()


# Publishing under a condition


def test_who_publishes_between_the_comparison_and_the_request_is_not_overwritten(
    s3_server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_backend(s3_server, url) as older, open_backend(s3_server, url) as newer:
        read_tagged = older._read_tagged
        for before, after in ((None, b"one"), (b"one", b"two")):

            def read_and_be_late(name: str, after: bytes = after) -> tuple[bytes | None, dict[str, str]]:
                found = read_tagged(name)
                newer.publish("pointer", after)
                return found

            with monkeypatch.context() as patched:
                patched.setattr(older, "_read_tagged", read_and_be_late)
                with pytest.raises(KeyChangedError, match="pointer"):
                    older.publish_if("pointer", b"late", expected=before)
            assert newer.read("pointer") == after


def test_a_conditional_publication_costs_the_requests_of_reading_and_publishing(
    s3_server: S3Server, s3_proxy: Proxy, url: str
) -> None:
    with open_backend(s3_server.through(s3_proxy), url) as backend:
        backend.publish_if("pointer", b"one", expected=None)
        backend.publish_if("pointer", b"two", expected=b"one")
    assert [request.operation for request in s3_proxy.requests] == ["GetObject", "PutObject"] * 2


def test_a_publication_whose_answer_is_lost_is_not_taken_for_another_writers(
    s3_server: S3Server, s3_proxy: Proxy, url: str
) -> None:
    s3_proxy.add(Rule(LoseAnswer(), "PutObject"))
    with open_backend(s3_server.through(s3_proxy), url) as backend:
        backend.publish_if("pointer", b"one", expected=None)
        assert backend.read("pointer") == b"one"
    assert len(s3_proxy.find("PutObject")) == 2


def test_a_condition_that_the_server_gets_wrong_is_left_out_from_then_on(
    s3_server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_backend(s3_server, url) as backend:
        backend.publish("pointer", b"one")
        sent: list[Mapping[str, str]] = []
        put = backend._client.put

        def refuse(*given: Any, conditions: Mapping[str, str], **named: Any) -> None:
            sent.append(conditions)
            if conditions:
                raise answered("NotImplemented" if len(sent) == 1 else "PreconditionFailed", 501, "no such header")
            put(*given, conditions=conditions, **named)

        monkeypatch.setattr(backend._client, "put", refuse)
        for before, after in ((b"one", b"two"), (b"two", b"three")):
            backend.publish_if("pointer", after, expected=before)
        assert backend.read("pointer") == b"three"
        assert [len(conditions) for conditions in sent] == [1, 0, 0]
        assert not backend.conditional_publish
