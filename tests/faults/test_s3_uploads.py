"""Writes to S3 whose requests go wrong: they succeed in the end with the right bytes, or raise and leave no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hpdcp._base.backend import Backend
from hpdcp._base.errors import KeyNotFoundError, StorageError
from tests.faults.s3_faults import LARGE, ONCE, PART, by_name, data_of, open_s3, pieces
from tests.support.proxy import Answer, CutRequest, Fault, LoseAnswer, Proxy, Refuse, Rule, Slow
from tests.support.s3 import S3Server

DATA = data_of(LARGE)


@pytest.fixture
def prefix(s3_server: S3Server) -> str:
    return s3_server.new_prefix()


@pytest.fixture
def backend(s3_server: S3Server, s3_proxy: Proxy, prefix: str) -> Iterator[Backend]:
    with open_s3(s3_server.through(s3_proxy), prefix) as backend:
        yield backend


def write(backend: Backend, data: bytes = DATA) -> None:
    backend.write("key", pieces(data), size=len(data), exclusive=False)


def fetch(server: S3Server, prefix: str) -> bytes:
    """What the key holds, without hpdcp."""
    client = server.client()
    try:
        folder = prefix.removeprefix(f"s3://{server.bucket}/")
        data: bytes = client.get_object(Bucket=server.bucket, Key=f"{folder}/key")["Body"].read()
    finally:
        client.close()
    return data


@pytest.mark.parametrize("fault", **by_name({**ONCE, "its body is cut": CutRequest(1 << 20)}))
def test_a_part_that_fails_once_is_sent_again(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend, fault: Fault
) -> None:
    rule = s3_proxy.add(Rule(fault, "UploadPart", skip=1))
    write(backend)
    assert rule.hits == 1
    assert fetch(s3_server, prefix) == DATA
    assert s3_server.objects(prefix) == {"key": LARGE}
    assert s3_server.open_uploads(prefix) == []


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "CompleteMultipartUpload"])
@pytest.mark.parametrize("fault", **by_name(ONCE))
def test_an_upload_whose_beginning_or_end_fails_once_succeeds(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend, operation: str, fault: Fault
) -> None:
    rule = s3_proxy.add(Rule(fault, operation))
    write(backend)
    assert rule.hits == 1
    assert fetch(s3_server, prefix) == DATA
    assert s3_server.open_uploads(prefix) == []


@pytest.mark.parametrize("fault", **by_name({**ONCE, "its body is cut": CutRequest(100)}))
def test_a_small_object_whose_request_fails_once_is_sent_again(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend, fault: Fault
) -> None:
    rule = s3_proxy.add(Rule(fault, "PutObject"))
    write(backend, DATA[:5000])
    assert rule.hits == 1
    assert fetch(s3_server, prefix) == DATA[:5000]
    rule = s3_proxy.add(Rule(fault, "PutObject"))
    backend.publish("key", b"published")
    assert rule.hits == 1
    assert fetch(s3_server, prefix) == b"published"


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), CutRequest()], ids=["overloaded", "cut"])
def test_an_upload_that_fails_for_good_raises_and_leaves_the_old_bytes(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend, operation: str, fault: Fault
) -> None:
    backend.publish("key", b"old")
    s3_proxy.add(Rule(fault, operation, times=None))
    with pytest.raises(StorageError, match="key") as caught:
        write(backend)
    assert prefix in str(caught.value)
    assert fetch(s3_server, prefix) == b"old"
    assert s3_server.open_uploads(prefix) == []
    s3_proxy.reset()
    write(backend)
    assert fetch(s3_server, prefix) == DATA


def test_an_upload_is_refused_for_good_and_leaves_nothing_open(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend
) -> None:
    rule = s3_proxy.add(Rule(Answer(403, "AccessDenied"), "UploadPart", times=None))
    with pytest.raises(StorageError, match="key"):
        write(backend)
    # Asking again would not change the answer.
    assert rule.hits <= LARGE // PART + 1
    assert s3_server.objects(prefix) == {}
    assert s3_server.open_uploads(prefix) == []


@pytest.mark.parametrize("fault", **by_name(ONCE))
def test_an_abort_that_fails_once_is_tried_again(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend, fault: Fault
) -> None:
    s3_proxy.add(Rule(Answer(403, "AccessDenied"), "UploadPart", times=None))
    rule = s3_proxy.add(Rule(fault, "AbortMultipartUpload"))
    with pytest.raises(StorageError, match="key"):
        write(backend)
    assert rule.hits == 1
    assert s3_server.open_uploads(prefix) == []


def test_an_abort_that_fails_for_good_hides_nothing_of_why_it_was_made(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend
) -> None:
    s3_proxy.add(Rule(Answer(403, "AccessDenied"), "UploadPart", times=None))
    s3_proxy.add(Rule(Answer(500), "AbortMultipartUpload", times=None))
    with pytest.raises(StorageError, match="key") as caught:
        write(backend)
    assert "permi" in str(caught.value) or "denied" in str(caught.value).lower()
    assert s3_server.objects(prefix) == {}


def test_a_producer_that_fails_has_its_upload_aborted(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend
) -> None:
    def failing() -> Iterator[memoryview]:
        yield from pieces(DATA[: 2 * PART])
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        backend.write("key", failing(), size=LARGE, exclusive=False)
    assert s3_proxy.find("CreateMultipartUpload")
    assert s3_server.objects(prefix) == {}
    assert s3_server.open_uploads(prefix) == []


def test_a_slow_upload_is_no_failed_one(s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend) -> None:
    s3_proxy.add(Rule(Slow(4 * PART), "UploadPart", times=None))
    write(backend)
    assert fetch(s3_server, prefix) == DATA
    assert len(s3_proxy.find("UploadPart")) == LARGE // PART + 1


def test_a_server_that_refuses_connections_for_a_moment_is_waited_for(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend
) -> None:
    rule = s3_proxy.add(Rule(Refuse(0.3), "UploadPart", skip=1))
    write(backend)
    assert rule.hits == 1
    assert fetch(s3_server, prefix) == DATA
    assert s3_server.open_uploads(prefix) == []


@pytest.mark.parametrize("fault", **by_name(ONCE))
def test_a_delete_that_fails_once_is_tried_again(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend, fault: Fault
) -> None:
    backend.publish("key", b"1")
    backend.publish("other", b"2")
    rule = s3_proxy.add(Rule(fault, line="^(DELETE|POST)"))
    backend.delete(["key", "other", "never there"])
    assert rule.hits == 1
    assert s3_server.objects(prefix) == {}


def test_deletes_that_fail_for_good_are_named(s3_proxy: Proxy, backend: Backend) -> None:
    backend.publish("key", b"1")
    s3_proxy.add(Rule(Answer(500), line="^(DELETE|POST)", times=None))
    with pytest.raises(StorageError, match="key"):
        backend.delete(["key"])
    s3_proxy.reset()
    assert backend.read("key") == b"1"
    backend.delete(["key"])
    with pytest.raises(KeyNotFoundError):
        backend.read("key")


def test_a_lost_answer_of_a_publication_is_no_failed_one(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend
) -> None:
    backend.publish("key", b"old")
    s3_proxy.add(Rule(LoseAnswer(), "PutObject", times=2))
    backend.publish("key", b"new")
    assert fetch(s3_server, prefix) == b"new"


def test_uploads_of_killed_writers_are_aborted_when_they_have_been_silent(
    s3_server: S3Server, prefix: str, backend: Backend
) -> None:
    folder = prefix.removeprefix(f"s3://{s3_server.bucket}/")
    with contextlib.closing(s3_server.client()) as client:
        for name in ("_rank0_.dead.safetensors", "_rank1_.dead.safetensors", "a user's"):
            named = {"Bucket": s3_server.bucket, "Key": f"{folder}/{name}"}
            upload = client.create_multipart_upload(**named)["UploadId"]
            if name.startswith("_rank0_"):
                client.upload_part(**named, UploadId=upload, PartNumber=1, Body=b"part")
    everything = s3_server.open_uploads(prefix)
    assert len(everything) == 3
    backend.remove_leftovers(silent_for=3600, belongs=lambda key: True)
    assert s3_server.open_uploads(prefix) == everything
    # Clocks of one machine, whose answers are dated to the second.
    backend.remove_leftovers(silent_for=-1, belongs=lambda key: ".dead." in key)
    assert s3_server.open_uploads(prefix) == ["a user's"]
