"""Saves to S3 whose requests go wrong: the new checkpoint loads, or the save raises and the previous one loads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import hpdcp
from hpdcp._base.errors import CommitUncertainError, HpdcpError, StorageError
from hpdcp_backends._s3.body import Body
from hpdcp_backends._s3.client import S3Client
from tests.faults.s3_faults import ENGINES, ONCE, Engine, by_name, check_sound, loaded_step, settings, state
from tests.services.s3 import READER_KEYS, STRANGER_KEYS
from tests.support.proxy import Answer, CutAnswer, Fault, LoseAnswer, Proxy, Rule
from tests.support.s3 import S3Server


@pytest.fixture
def url(s3_server: S3Server, s3_proxy: Proxy) -> Iterator[str]:
    """Where step 1 is saved, by way of the proxy."""
    with hpdcp.config.using(**settings(s3_server.through(s3_proxy))):
        url = s3_server.new_prefix()
        hpdcp.save(state(1), checkpoint_id=url)
        s3_proxy.reset()
        yield url


ONE_FILE = r"_rank0_.*\.safetensors"
STEPS = {
    "the claim": ("PutObject", r"/\.attempt$"),
    "the first listing": ("ListObjects", ""),
    "the start of the data": ("CreateMultipartUpload", ONE_FILE),
    "a part of the data": ("UploadPart", ONE_FILE),
    "the end of the data": ("CompleteMultipartUpload", ONE_FILE),
    "the commit": ("PutObject", r"/\.metadata$"),
    "the clean-up": (None, "^(DELETE|POST .*delete)"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", **by_name({name: ONCE[name] for name in ("its answer is lost", "the server fails")}))
def test_a_save_survives_what_happens_once(
    s3_server: S3Server, s3_proxy: Proxy, url: str, step: str, fault: Fault
) -> None:
    operation, line = STEPS[step]
    rule = s3_proxy.add(Rule(fault, operation, line))
    metadata = hpdcp.save(state(2), checkpoint_id=url)
    assert rule.hits == 1
    assert loaded_step(url) == 2
    check_sound(s3_server, url, metadata)


@pytest.mark.parametrize("step", [step for step in STEPS if step != "the clean-up"])
def test_a_save_that_fails_for_good_leaves_the_previous_step(
    s3_server: S3Server, s3_proxy: Proxy, url: str, step: str
) -> None:
    operation, line = STEPS[step]
    s3_proxy.add(Rule(Answer(503, "SlowDown"), operation, line, times=None))
    with pytest.raises(HpdcpError, match=re.escape(s3_server.bucket)):
        hpdcp.save(state(2), checkpoint_id=url)
    s3_proxy.reset()
    assert loaded_step(url) == 1
    assert s3_server.open_uploads(url) == []
    metadata = hpdcp.save(state(3), checkpoint_id=url)
    assert loaded_step(url) == 3
    if step != "the commit":
        check_sound(s3_server, url, metadata)


def test_a_clean_up_that_fails_for_good_fails_no_save(s3_server: S3Server, s3_proxy: Proxy, url: str) -> None:
    operation, line = STEPS["the clean-up"]
    s3_proxy.add(Rule(Answer(503, "SlowDown"), operation, line, times=None))
    hpdcp.save(state(2), checkpoint_id=url)
    s3_proxy.reset()
    assert loaded_step(url) == 2
    metadata = hpdcp.save(state(3), checkpoint_id=url)
    check_sound(s3_server, url, metadata)


@pytest.mark.parametrize("fault", **by_name({**ONCE, "its body is cut": CutAnswer(1 << 20)}))
@pytest.mark.parametrize("engine", ENGINES)
def test_a_load_survives_what_happens_once(
    s3_server: S3Server, s3_proxy: Proxy, url: str, engine: Engine, fault: Fault
) -> None:
    metadata = s3_proxy.add(Rule(fault, "GetObject", r"/\.metadata$"))
    data = s3_proxy.add(Rule(fault, "GetObject", ONE_FILE, skip=1))
    with hpdcp.config.using(**settings(s3_server.through(s3_proxy), engine)):
        assert loaded_step(url) == 1
    assert (metadata.hits, data.hits) == (1, 1)


def test_a_load_that_fails_for_good_raises(s3_proxy: Proxy, url: str) -> None:
    s3_proxy.add(Rule(CutAnswer(100), "GetObject", ONE_FILE, times=None))
    with pytest.raises(StorageError, match="_rank0_"):
        loaded_step(url)


@pytest.mark.parametrize(
    "keys", [READER_KEYS, STRANGER_KEYS, ("nobody", "nothing")], ids=["reader", "stranger", "nobody"]
)
def test_wrong_keys_are_refused_before_any_data_moves(
    s3_server: S3Server, s3_proxy: Proxy, url: str, keys: tuple[str, str]
) -> None:
    access, secret = keys
    server = replace(s3_server.through(s3_proxy), access_key=access, secret_key=secret)
    with (
        hpdcp.config.using(**settings(server)),
        pytest.raises(StorageError, match=re.escape(s3_server.bucket)) as caught,
    ):
        hpdcp.save(state(2), checkpoint_id=url)
    assert secret not in str(caught.value)
    assert s3_proxy.received("UploadPart") == 0
    s3_proxy.reset()
    assert loaded_step(url) == 1


def test_a_bucket_that_is_not_there_is_named(s3_server: S3Server, s3_proxy: Proxy) -> None:
    with hpdcp.config.using(**settings(s3_server.through(s3_proxy))):
        with pytest.raises(HpdcpError, match="no-such-bucket"):
            hpdcp.save(state(1), checkpoint_id="s3://no-such-bucket/step")
        with pytest.raises(HpdcpError, match="no-such-bucket"):
            hpdcp.load(state(0), checkpoint_id="s3://no-such-bucket/step")
    assert s3_proxy.received("UploadPart") == 0


def test_a_commit_that_went_through_is_no_failed_save_though_no_answer_ever_came(
    s3_server: S3Server, s3_proxy: Proxy, url: str
) -> None:
    rule = s3_proxy.add(Rule(LoseAnswer(), "PutObject", r"/\.metadata$", times=None))
    metadata = hpdcp.save(state(2), checkpoint_id=url)
    assert rule.hits > 1
    assert loaded_step(url) == 2
    check_sound(s3_server, url, metadata)


def test_a_commit_of_which_nothing_can_be_learned_says_so_and_removes_nothing(
    s3_server: S3Server, s3_proxy: Proxy, url: str
) -> None:
    s3_proxy.add(Rule(LoseAnswer(), "PutObject", r"/\.metadata$", times=None))
    s3_proxy.add(Rule(LoseAnswer(), "HeadObject", r"/\.metadata$", times=None))
    before = s3_server.objects(url)
    with pytest.raises(CommitUncertainError):
        hpdcp.save(state(2), checkpoint_id=url)
    s3_proxy.reset()
    assert loaded_step(url) == 2
    assert set(before) < set(s3_server.objects(url))
    metadata = hpdcp.save(state(3), checkpoint_id=url)
    assert loaded_step(url) == 3
    assert set(metadata.files) <= set(s3_server.objects(url))


def test_a_commit_that_the_store_does_after_its_last_answer_loads(
    s3_server: S3Server, s3_proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[tuple[str, bytes]] = []
    put = S3Client.put

    def held_back(self: S3Client, key: str, body: Body, **rest: Any) -> None:
        if key.endswith("/.metadata"):
            late.append((key, b"".join(iter(lambda: bytes(body.read()), b""))))
        put(self, key, body, **rest)

    monkeypatch.setattr(S3Client, "put", held_back)
    s3_proxy.add(Rule(Answer(504, "GatewayTimeout"), "PutObject", r"/\.metadata$", times=None))
    with pytest.raises(CommitUncertainError, match="GatewayTimeout"):
        hpdcp.save(state(2), checkpoint_id=url)
    assert loaded_step(url) == 1
    with contextlib.closing(s3_server.client()) as client:
        client.put_object(Bucket=s3_server.bucket, Key=late[0][0], Body=late[0][1])
    assert loaded_step(url) == 2
