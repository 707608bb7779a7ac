"""Who one is, where the server is, and what is said when either is wrong; on the real server, by both engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import InvalidArgumentError, KeyNotFoundError, NotSupportedError, StorageError
from hpdcp_backends.s3 import S3Backend
from tests.support.s3 import S3Server

engines = pytest.mark.parametrize("engine", ["obstore", "botocore"])
AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_CA_BUNDLE",
)  # fmt: skip


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that knows of no server and no keys."""
    for name in AWS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def round_trip(backend: S3Backend) -> None:
    with backend:
        backend.prepare()
        backend.publish("key", b"0123456789")
        target = bytearray(4)
        backend.read_ranges("key", [ByteRange(3, 4)], [memoryview(target)])
        assert target == b"3456"


@engines
def test_the_usual_variables_are_enough(s3_server: S3Server, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    round_trip(S3Backend(s3_server.new_prefix(), engine=engine))


@engines
def test_options_go_before_variables(s3_server: S3Server, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody else")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "and their secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    round_trip(S3Backend(s3_server.new_prefix(), engine=engine, storage_options=s3_server.storage_options()))


@engines
def test_a_profile_whose_credentials_are_renewed_by_a_program(
    s3_server: S3Server, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "credentials.py"
    program.write_text(
        "import datetime, json\n"
        "until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)\n"
        f"print(json.dumps(dict(Version=1, AccessKeyId={s3_server.access_key!r}, "
        f"SecretAccessKey={s3_server.secret_key!r}, Expiration=until.isoformat())))\n"
    )
    (tmp_path / "config").write_text(
        f"[profile team]\nregion = {s3_server.region}\nendpoint_url = {s3_server.url}\n"
        f"credential_process = {sys.executable} {program}\n"
    )
    round_trip(S3Backend(s3_server.new_prefix(), engine=engine, storage_options={"profile": "team"}))
    monkeypatch.setenv("AWS_PROFILE", "team")
    round_trip(S3Backend(s3_server.new_prefix(), engine=engine))


@engines
def test_fsspecs_own_configuration_lies_underneath(
    s3_server: S3Server, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": s3_server.access_key, "secret": s3_server.secret_key})
    options = {"endpoint_url": s3_server.url}
    round_trip(S3Backend(s3_server.new_prefix(), engine=engine, storage_options=options))


@engines
def test_https_with_an_authority_of_ones_own(s3_server: S3Server, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if s3_server.https_url is None or s3_server.ca is None:
        pytest.skip("the server has no certificate: openssl is not installed")
    keys = {"key": s3_server.access_key, "secret": s3_server.secret_key, "endpoint_url": s3_server.https_url}
    trusted = keys | {"client_kwargs": {"verify": s3_server.ca}}
    round_trip(S3Backend(s3_server.new_prefix(), engine=engine, storage_options=trusted))
    untrusted = S3Backend(s3_server.new_prefix(), engine=engine, storage_options=keys)
    with untrusted, pytest.raises(StorageError, match="AWS_CA_BUNDLE"):
        untrusted.prepare()
    with untrusted, pytest.raises(StorageError, match="AWS_CA_BUNDLE"):
        untrusted.read_ranges("key", [ByteRange(0, 1)], [memoryview(bytearray(1))])
    monkeypatch.setenv("AWS_CA_BUNDLE", s3_server.ca)
    round_trip(S3Backend(s3_server.new_prefix(), engine=engine, storage_options=keys))


def test_the_automatic_engine_leaves_to_botocore_what_obstore_does_not_trust(
    s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    if s3_server.https_url is None:
        pytest.skip("the server has no certificate: openssl is not installed")
    keys = {"key": s3_server.access_key, "secret": s3_server.secret_key, "endpoint_url": s3_server.https_url}
    caplog.set_level("INFO", "hpdcp_backends.s3")
    with (
        S3Backend(s3_server.new_prefix(), storage_options=keys) as backend,
        pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        backend.read_ranges("key", [ByteRange(0, 1)], [memoryview(bytearray(1))])
    assert "with botocore instead of obstore" in caplog.text


def test_options_that_obstore_does_not_know_are_left_to_botocore_or_refused(
    s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    options = s3_server.storage_options(config_kwargs={"proxies": {"https": "http://127.0.0.1:9"}})
    caplog.set_level("INFO", "hpdcp_backends.s3")
    round_trip(S3Backend(s3_server.new_prefix(), storage_options=options))
    assert "proxies" in caplog.text
    with pytest.raises(NotSupportedError, match="proxies"):
        round_trip(S3Backend(s3_server.new_prefix(), storage_options=options, engine="obstore"))


def every_call(backend: S3Backend) -> dict[str, Callable[[], object]]:
    large = 70 << 20
    return {
        "prepare": backend.prepare,
        "list": backend.list_keys,
        "size": lambda: backend.size("key"),
        "read": lambda: backend.read("key"),
        "ranges": lambda: backend.read_ranges("key", [ByteRange(0, 1)], [memoryview(bytearray(1))]),
        "publish": lambda: backend.publish("key", b"x"),
        "write": lambda: backend.write("key", [memoryview(bytes(large))], size=large, exclusive=False),
        "delete": lambda: backend.delete(["key"]),
        "delete several": lambda: backend.delete(["key", "another"]),
    }


def check_failures(backend: S3Backend, server: S3Server, *expected: str, but: Sequence[str] = ()) -> None:
    """Every call fails with an error that names the bucket, the endpoint and what is expected, and no secret."""
    with backend:
        for name, call in every_call(backend).items():
            if name in but:
                continue
            with pytest.raises(StorageError) as caught:
                call()
            text = str(caught.value)
            assert not isinstance(caught.value, KeyNotFoundError), (name, text)
            assert backend.url.split("/")[2] in text, (name, text)
            for word in expected:
                assert word in text, (name, text)
            if name not in ("prepare", "list"):
                assert "'key'" in text, (name, text)
            assert server.secret_key not in repr(caught.value) + text


@engines
def test_a_missing_bucket_is_named_before_anything_is_written(s3_server: S3Server, engine: str) -> None:
    options = s3_server.storage_options()
    backend = S3Backend("s3://no-such-bucket/run", engine=engine, storage_options=options)
    # SeaweedFS makes a bucket for an object; `prepare` comes first, and does not.
    made = ("publish", "write", "delete", "delete several")
    check_failures(backend, s3_server, s3_server.url, "NoSuchBucket", "Create the bucket", but=made)


@engines
def test_a_wrong_secret_is_told_and_not_shown(s3_server: S3Server, engine: str) -> None:
    options = s3_server.storage_options(secret="a wrong secret")
    backend = S3Backend(s3_server.new_prefix(), engine=engine, storage_options=options)
    check_failures(backend, s3_server, s3_server.url, "SignatureDoesNotMatch", "storage_options key and secret")
    backend = S3Backend(s3_server.new_prefix(), engine=engine, storage_options=options)
    with backend, pytest.raises(StorageError) as caught:
        backend.prepare()
    assert "a wrong secret" not in str(caught.value)
    assert "wrong secret" not in repr(backend)


@engines
def test_an_unknown_key_is_told(s3_server: S3Server, engine: str) -> None:
    options = s3_server.storage_options(key="nobody")
    check_failures(S3Backend(s3_server.new_prefix(), engine=engine, storage_options=options), s3_server, s3_server.url)


@engines
def test_without_credentials_the_ways_to_give_them_are_told(s3_server: S3Server, engine: str) -> None:
    backend = S3Backend(s3_server.new_prefix(), engine=engine, storage_options={"endpoint_url": s3_server.url})
    check_failures(backend, s3_server, "NoCredentialsError", "AWS_ACCESS_KEY_ID", "anon=True")


@engines
def test_anonymous_requests_are_not_signed(s3_server: S3Server, engine: str) -> None:
    options = s3_server.storage_options(anon=True)
    backend = S3Backend(s3_server.new_prefix(), engine=engine, storage_options=options)
    # This server lets nobody in without a signature; a signed request would have succeeded.
    check_failures(backend, s3_server, "s3:GetObject")


@engines
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_an_endpoint_where_nothing_answers_is_told_at_once(s3_server: S3Server, engine: str, endpoint: str) -> None:
    options = s3_server.storage_options(client_kwargs={"endpoint_url": endpoint})
    with S3Backend(s3_server.new_prefix(), engine=engine, storage_options=options, retry_seconds=1) as backend:
        for call in (every_call(backend)["prepare"], every_call(backend)["ranges"]):
            with pytest.raises(StorageError, match="Nothing answers at the endpoint") as caught:
                call()
            assert endpoint in str(caught.value)


def test_an_unknown_profile_is_told() -> None:
    with (
        S3Backend("s3://bucket/x", storage_options={"profile": "nobody"}) as backend,
        pytest.raises(StorageError, match=r"nobody.*AWS_PROFILE"),
    ):
        backend.prepare()


@pytest.mark.parametrize(
    "options",
    [
        {"config_kwargs": {"no_such_setting": 1}},
        {"endpoint_url": "no url at all"},
        {"client_kwargs": {"no_such_setting": 1}},
        {"no_such_option": 1},
        {"s3_additional_kwargs": {"StorageClas": "STANDARD_IA"}},
        {"key": "only a key"},
        {"key": "one", "username": "another", "secret": "x"},
        {"client_kwargs": 7},
        {"session": object()},
        {"version_aware": True},
    ],
    ids=lambda options: str(next(iter(options))),
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError), S3Backend("s3://bucket/x", storage_options=options) as backend:
        backend.prepare()
