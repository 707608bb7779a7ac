"""Reads from S3 whose requests go wrong: they succeed in the end with the right bytes, or raise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import KeyNotFoundError, KeyTruncatedError, StorageError
from tests.faults.s3_faults import ENGINES, ONCE, Engine, by_name, data_of, open_s3, pieces
from tests.support.proxy import Answer, CutAnswer, Do, Fault, Proxy, Refuse, Rule, Slow, Stall
from tests.support.s3 import S3Server

pytestmark = pytest.mark.parametrize("engine", ENGINES)
SIZE = 3 << 20
DATA = data_of(SIZE)
LAST = 64 << 10
RANGES = [ByteRange(0, 1 << 20), ByteRange((1 << 20) + 5, (1 << 20) - 5), ByteRange(SIZE - LAST, LAST)]


@pytest.fixture
def prefix(s3_server: S3Server) -> str:
    return s3_server.new_prefix()


@pytest.fixture
def backend(s3_server: S3Server, s3_proxy: Proxy, prefix: str, engine: Engine) -> Iterator[Backend]:
    with open_s3(s3_server.through(s3_proxy), prefix, engine) as backend:
        # Three requests for RANGES.
        backend.coalesce_gap, backend.max_read_bytes = 0, 1 << 20
        backend.write("key", pieces(DATA), size=SIZE, exclusive=False)
        s3_proxy.reset()
        yield backend


def read_parts(backend: Backend) -> list[bytes]:
    targets = [bytearray(range_.length) for range_ in RANGES]
    backend.read_ranges("key", RANGES, [memoryview(target) for target in targets])
    return [bytes(target) for target in targets]


def parts_of(data: bytes) -> list[bytes]:
    return [data[range_.offset : range_.stop] for range_ in RANGES]


BODY = {
    "its body is cut in the midst": CutAnswer(300_000),
    "its body is cut before the last byte": CutAnswer(LAST - 1),
}


@pytest.mark.parametrize("fault", **by_name(ONCE | BODY))
def test_a_range_that_fails_once_is_fetched_again(s3_proxy: Proxy, backend: Backend, fault: Fault) -> None:
    rule = s3_proxy.add(Rule(fault, "GetObject", skip=1))
    assert read_parts(backend) == parts_of(DATA)
    assert rule.hits == 1


@pytest.mark.parametrize("fault", **by_name(ONCE | BODY))
def test_a_whole_object_that_fails_once_is_fetched_again(s3_proxy: Proxy, backend: Backend, fault: Fault) -> None:
    rule = s3_proxy.add(Rule(fault, "GetObject"))
    assert backend.read("key") == DATA
    assert rule.hits == 1


@pytest.mark.parametrize("fault", **by_name(ONCE))
def test_a_listing_and_a_size_that_fail_once_are_asked_for_again(
    s3_proxy: Proxy, backend: Backend, fault: Fault
) -> None:
    rule = s3_proxy.add(Rule(fault, "ListObjects"))
    assert [(info.key, info.size) for info in backend.list_keys()] == [("key", SIZE)]
    assert rule.hits == 1
    rule = s3_proxy.add(Rule(fault, "HeadObject"))
    assert backend.size("key") == SIZE
    assert rule.hits == 1


@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), CutAnswer(1000)], ids=["overloaded", "cut"])
def test_reads_that_fail_for_good_raise(s3_proxy: Proxy, prefix: str, backend: Backend, fault: Fault) -> None:
    s3_proxy.add(Rule(fault, "GetObject", times=None))
    with pytest.raises(StorageError, match="key") as caught:
        read_parts(backend)
    assert prefix in str(caught.value)
    assert not isinstance(caught.value, KeyTruncatedError | KeyNotFoundError)
    with pytest.raises(StorageError, match="key"):
        backend.read("key")
    s3_proxy.reset()
    assert read_parts(backend) == parts_of(DATA)


def test_what_is_not_there_or_not_allowed_is_asked_for_once(s3_proxy: Proxy, backend: Backend) -> None:
    with pytest.raises(KeyNotFoundError, match="missing"):
        backend.read("missing")
    rule = s3_proxy.add(Rule(Answer(403, "AccessDenied"), "GetObject", times=None))
    with pytest.raises(StorageError, match="key"):
        backend.read("key")
    assert rule.hits == 1


def test_an_answer_that_does_not_come_is_given_up_and_asked_for_again(s3_proxy: Proxy, backend: Backend) -> None:
    rule = s3_proxy.add(Rule(Stall(60), "GetObject", skip=1))
    assert read_parts(backend) == parts_of(DATA)
    assert rule.hits == 1


def test_a_slow_download_is_no_failed_one(s3_proxy: Proxy, backend: Backend) -> None:
    s3_proxy.add(Rule(Slow(2 * SIZE), "GetObject", times=None))
    assert read_parts(backend) == parts_of(DATA)
    assert len(s3_proxy.find("GetObject")) == len(RANGES)


def test_a_server_that_refuses_connections_for_a_moment_is_waited_for(s3_proxy: Proxy, backend: Backend) -> None:
    rule = s3_proxy.add(Rule(Refuse(0.3), "GetObject", skip=1))
    assert read_parts(backend) == parts_of(DATA)
    assert rule.hits == 1


def test_ranges_never_come_from_two_versions_of_an_object(
    s3_server: S3Server, s3_proxy: Proxy, prefix: str, backend: Backend, engine: Engine
) -> None:
    other = data_of(SIZE, seed=2)
    with open_s3(s3_server, prefix, engine) as writer:
        rule = s3_proxy.add(Rule(Do(lambda: writer.publish("key", other)), "GetObject", skip=1))
        try:
            found = read_parts(backend)
        except StorageError:
            found = []
    assert rule.hits == 1
    assert found in ([], parts_of(DATA), parts_of(other))
    assert read_parts(backend) == parts_of(other)


def test_an_object_that_got_shorter_is_told_from_a_broken_connection(
    s3_server: S3Server, prefix: str, backend: Backend, engine: Engine
) -> None:
    with open_s3(s3_server, prefix, engine) as writer:
        writer.publish("key", DATA[: 1 << 20])
    with pytest.raises(KeyTruncatedError, match=str(1 << 20)):
        backend.read_ranges("key", [ByteRange(SIZE - LAST, LAST)], [memoryview(bytearray(LAST))])
