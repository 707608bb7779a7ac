"""What S3's requests are made of, without a server: bodies, waits between tries, addresses, and words for failures."""

from __future__ import annotations

import base64
import logging
import random
import threading
from collections.abc import Sequence
from typing import Any

import crc32c
import pytest

from hpdcp._base.errors import InvalidArgumentError, KeyNotFoundError, StorageError
from hpdcp_backends._s3.body import Body
from hpdcp_backends._s3.client import S3Client
from hpdcp_backends._s3.errors import Location, RequestFailedError, StoppedError, answered
from hpdcp_backends._s3.options import S3Options
from hpdcp_backends._s3.readers import _store_options
from hpdcp_backends._s3.retry import Retries
from hpdcp_backends.s3 import S3Backend

KEYS = {"key": "AKIA123", "secret": "very secret"}


def read_all(body: Body, size: int) -> bytes:
    return b"".join(iter(lambda: bytes(body.read(size)), b""))


@pytest.mark.parametrize("sizes", [[], [0], [5], [0, 3, 0, 0, 700_000, 1, 0], [1 << 20]])
def test_a_body_is_its_views_however_it_is_read_and_from_wherever(sizes: list[int]) -> None:
    views = [memoryview(random.Random(number).randbytes(size)) for number, size in enumerate(sizes)]
    expected = b"".join(views)
    body = Body(views, threading.Event())
    assert len(body) == len(expected)
    assert read_all(body, 16384) == expected
    assert body.tell() == len(expected)
    for position in sorted({0, min(4, len(expected)), len(expected) // 2, len(expected)}):
        assert body.seek(position) == body.tell() == position
        assert read_all(body, 1 << 20) == expected[position:]
    assert body.seek(0, 2) == len(expected)
    assert base64.b64decode(body.crc32c()) == crc32c.crc32c(expected).to_bytes(4, "big")


def test_a_body_stops_when_it_is_told_to() -> None:
    stop = threading.Event()
    body = Body([memoryview(bytes(1 << 20))], stop)
    assert body.read(100)
    stop.set()
    with pytest.raises(StoppedError):
        body.read(100)


class Server:
    """Fails so many times, then answers."""

    def __init__(self, failures: int, failure: RequestFailedError) -> None:
        self.asked = 0
        self._failures = failures
        self._failure = failure

    def __call__(self) -> int:
        self.asked += 1
        if self.asked <= self._failures:
            raise self._failure
        return self.asked


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        found.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr("hpdcp_backends._s3.retry.time.sleep", sleep)
    monkeypatch.setattr("hpdcp_backends._s3.retry.time.monotonic", lambda: clock[0])
    return found


BUSY = answered("SlowDown", 503, "")
UNREACHABLE = RequestFailedError("EndpointConnectionError", "", temporary=True, unreachable=True)


def test_waits_double_and_have_a_longest(waits: list[float]) -> None:
    assert Retries(10, 1000).call(Server(10, BUSY)) == 11
    for number, wait in enumerate(waits):
        assert min(10, 0.2 * 2**number) / 2 <= wait <= min(10, 0.2 * 2**number)


def test_tries_are_bounded_by_count_and_by_time(waits: list[float]) -> None:
    server = Server(100, BUSY)
    with pytest.raises(RequestFailedError, match="SlowDown"):
        Retries(3, 1000).call(server)
    assert server.asked == 4
    waits.clear()
    with pytest.raises(RequestFailedError, match="SlowDown"):
        Retries(1000, 30).call(Server(1000, BUSY))
    assert sum(waits) <= 30


def test_a_server_that_never_answered_is_given_up_soon_and_one_that_did_is_not(waits: list[float]) -> None:
    retries = Retries(100, 120)
    with pytest.raises(RequestFailedError, match="EndpointConnectionError"):
        retries.call(Server(100, UNREACHABLE))
    assert sum(waits) <= 4
    assert retries.call(Server(0, UNREACHABLE)) == 1
    assert retries.call(Server(12, UNREACHABLE)) == 13


def test_silence_is_no_answer_and_is_told_of(waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """As where something accepts connections and never answers: each try costs its whole timeout."""
    silent = RequestFailedError("ReadTimeoutError", "", temporary=True)
    with pytest.raises(RequestFailedError, match="ReadTimeoutError"), caplog.at_level(logging.WARNING):
        Retries(100, 120).call(Server(100, silent))
    assert sum(waits) <= 4
    assert "ReadTimeoutError" in caplog.text


def test_a_request_that_takes_longer_than_all_the_time_is_still_sent_three_times(waits: list[float]) -> None:
    server = Server(100, BUSY)
    with pytest.raises(RequestFailedError, match="SlowDown"):
        Retries(10, 0).call(server)
    assert server.asked == 3


def test_what_will_not_change_is_not_tried_again(waits: list[float]) -> None:
    server = Server(1, answered("AccessDenied", 403, ""))
    with pytest.raises(RequestFailedError, match="AccessDenied"):
        Retries(10, 100).call(server)
    assert (server.asked, waits) == (1, [])


def test_waiting_ends_when_the_work_is_stopped() -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(StoppedError):
        Retries(100, 1000).call(Server(1000, BUSY), stop=stop)


def test_only_failures_after_which_the_work_may_be_done_are_doubts(waits: list[float]) -> None:
    doubts: list[RequestFailedError] = []
    retries = Retries(10, 100)
    retries.call(Server(1, UNREACHABLE), doubts=doubts)
    assert doubts == []
    retries.call(Server(1, BUSY), doubts=doubts)
    assert doubts == [BUSY]


def client_of(bucket: str, **options: Any) -> S3Client:
    region = options.pop("region", "eu-west-1")
    given = {**KEYS, "client_kwargs": {"region_name": region}, **options}
    return S3Client(bucket, S3Options.parse(given), connections=1)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(S3Client, "region", lambda self: "eu-west-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)


@pytest.mark.parametrize(
    ("bucket", "options", "endpoint", "virtual"),
    [
        ("bucket", {}, "https://bucket.s3.eu-west-1.amazonaws.com", True),
        ("dotted.bucket", {}, "https://s3.eu-west-1.amazonaws.com", False),
        ("bucket", {"endpoint_url": "http://minio:9000"}, "http://minio:9000", False),
        ("bucket", {"endpoint_url": "http://gateway/s3/"}, "http://gateway/s3", False),
        (
            "bucket",
            {"endpoint_url": "https://s3.example.org", "config_kwargs": {"s3": {"addressing_style": "virtual"}}},
            "https://bucket.s3.example.org",
            True,
        ),
        (
            "bucket",
            {"config_kwargs": {"use_dualstack_endpoint": True}},
            "https://bucket.s3.dualstack.eu-west-1.amazonaws.com",
            True,
        ),
    ],
)
def test_obstore_is_sent_where_botocore_would_go(
    bucket: str, options: dict[str, Any], endpoint: str, virtual: bool
) -> None:
    found = _store_options(client_of(bucket, **options))
    assert found["endpoint"] == found["aws_endpoint_url_s3"] == endpoint
    assert found["virtual_hosted_style_request"] is virtual


def test_who_pays_and_who_signs_reach_obstore() -> None:
    found = _store_options(client_of("bucket", requester_pays=True))
    assert found["request_payer"] is True
    assert found["credential_provider"]()["secret_access_key"] == KEYS["secret"]
    anonymous = _store_options(client_of("bucket", anon=True))
    assert anonymous["skip_signature"] is True
    assert "credential_provider" not in anonymous


def test_no_text_of_the_options_holds_a_secret() -> None:
    options = S3Options.parse({**KEYS, "token": "very secret token"})
    assert "secret" not in repr(options)
    assert "AKIA" not in repr(options)


def test_a_missing_key_is_an_error_of_its_own_and_a_missing_bucket_is_not() -> None:
    place = Location("s3://bucket/run", "bucket", "http://server")
    missing = place.error(answered("NoSuchKey", 404, ""), doing="read", key="a")
    assert isinstance(missing, KeyNotFoundError)
    assert "'a' in s3://bucket/run" in str(missing)
    no_bucket = place.error(answered("NoSuchBucket", 404, ""), doing="read", key="a")
    assert not isinstance(no_bucket, KeyNotFoundError)
    assert "http://server" in str(no_bucket)


@pytest.mark.parametrize("url", ["s3:/bucket", "http://bucket/x", "s3://", "s3:///key", "/folder"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="s3://bucket/prefix"):
        S3Backend(url)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3A://bucket/run//", "s3a://bucket/run"),
        ("s3://bucket/a b/#1?x=%20", "s3://bucket/a b/#1?x=%20"),
    ],
)
def test_what_follows_the_bucket_is_literal(given: str, url: str) -> None:
    with S3Backend(given) as backend:
        assert backend.url == url


@pytest.mark.parametrize(
    "tunables",
    [{"engine": "s3fs"}, {"part_bytes": 1 << 20}, {"retries": -1}, {"read_in_flight": 0}, {"write_in_flight": 0}],
)
def test_tunables_out_of_range_are_refused(tunables: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(tunables))):
        S3Backend("s3://bucket/x", **tunables)


def test_a_key_that_may_not_be_deleted_is_told_though_others_take_a_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = S3Backend("s3://bucket/run", storage_options=KEYS, retries=1)
    forbidden = RequestFailedError("AccessDenied", "", status=403)
    busy = RequestFailedError("SlowDown", "", temporary=True)
    answers = iter([{"run/a": forbidden, "run/b": busy}, {}])
    asked: list[list[str]] = []

    def delete_many(names: Sequence[str]) -> dict[str, RequestFailedError]:
        asked.append(list(names))
        return next(answers)

    monkeypatch.setattr(backend._client, "delete_many", delete_many)
    with pytest.raises(StorageError, match="AccessDenied") as caught:
        backend.delete(["a", "b", "c"])
    assert "'a'" in str(caught.value)
    assert asked == [["run/a", "run/b", "run/c"], ["run/b"]]
