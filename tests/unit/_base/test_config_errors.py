"""What is refused, and how the message names the place, what was expected and what was found."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hpdcp._base.config import Config, Setting, current, effective, parse_size, using
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._base.timing import log_once


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HPDCP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPDCP_CONFIG", "")


def refused(*parts: str) -> Any:
    return pytest.raises(InvalidArgumentError, match="(?s)" + ".*".join(parts))


@pytest.fixture(autouse=True)
def nothing_was_said_before() -> None:
    log_once.cache_clear()


@pytest.mark.parametrize("variable", ["HPDCP_BRODCAST", "HPDCP_BROADCASTS"])
def test_an_unknown_variable_is_ignored_with_one_warning_that_names_the_near_one(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, "auto")
    assert current() == current()
    (said,) = caplog.messages
    assert re.search(f"{variable}.*Did you mean HPDCP_BROADCAST\\?.*Known keys: backend, layout", said)


def test_a_file_that_may_not_be_read_is_as_if_it_were_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look = os.stat

    def closed(path: Any, **how: Any) -> os.stat_result:
        if str(path).endswith("hpdcp.toml"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return look(path, **how)

    monkeypatch.delenv("HPDCP_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "stat", closed)
    assert current().verify == current().verify == "auto"
    (said,) = caplog.messages
    assert "may not read" in said
    monkeypatch.setenv("HPDCP_CONFIG", str(tmp_path / "hpdcp.toml"))
    with refused("hpdcp.toml", "may not read"):
        current()


def test_an_unknown_key_in_the_file_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("zebra = 1")
    monkeypatch.setenv("HPDCP_CONFIG", str(path))
    with refused("mine.toml", "'zebra'", "Known keys"):
        current()


def test_an_unknown_argument_of_using_changes_nothing() -> None:
    unknown: Any = {"zebra": 1}
    with refused("using", "'zebra'"), using(**unknown):
        pytest.fail("the block must not run")
    assert current() == Config()


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("HPDCP_BACKEND", "", "a name"),
        ("HPDCP_BACKEND", "no spaces", "a name"),
        ("HPDCP_BACKEND__NAME", "nfs", "a name"),
        ("HPDCP_BROADCAST", "yes", "'auto', 'always', 'never'"),
        ("HPDCP_ALLOW_PICKLE", "maybe", "true or false"),
        ("HPDCP_CHECK_REPLICAS", "some", "'off', 'sample', 'all'"),
        ("HPDCP_ASYNC_STAGING_BUDGET", "-1", "a number of bytes"),
        ("HPDCP_ASYNC_STAGING_BUDGET", "1.5", "a number of bytes"),
        ("HPDCP_GROUP_TIMEOUT", "soon", "seconds, more than zero"),
        ("HPDCP_GROUP_TIMEOUT", "0", "seconds, more than zero"),
        ("HPDCP_EXIT_TIMEOUT", "inf", "finite"),
        ("HPDCP_KEEP_REPLACED_FOR", "-1", "zero or more"),
        ("HPDCP_ROUTES", "s3", "a list of tables"),
        ("HPDCP_BACKENDS", "5", "a table"),
        ("HPDCP_BACKENDS__S3", "5", "a table"),
        ("HPDCP_BACKENDS__S3__STORAGE_OPTIONS", "5", "a table"),
    ],
)
def test_a_bad_value_names_the_variable_the_key_what_was_expected_and_found(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(variable, value)
    key = variable.removeprefix("HPDCP_").lower().partition("__")[0]
    with refused(variable, key, "expected", expected, "found"):
        current()


@pytest.mark.parametrize("variable", ["HPDCP_BACKENDS____X", "HPDCP_BACKENDS__S3__"])
def test_a_variable_with_an_empty_part_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "x")
    with refused(variable, "empty part"):
        current()


@pytest.mark.parametrize(
    ("routes", "found"),
    [
        ([3], r"routes\[0\].*a table"),
        ([{"backend": "s3"}], r"routes\[0\]\.prefix.*None"),
        ([{"prefix": "relative/path"}], r"routes\[0\]\.prefix.*relative/path"),
        ([{"prefix": "/a"}, {"prefix": "/b", "zebra": 1}], r"routes\[1\]\.zebra.*prefix, backend, options"),
        ([{"prefix": "/a", "backend": 3}], r"routes\[0\]\.backend.*found 3"),
        ([{"prefix": "/a", "options": 3}], r"routes\[0\]\.options.*a table"),
    ],
)
def test_a_bad_route_is_named_by_its_position(routes: Any, found: str) -> None:
    with refused("using", found), using(routes=routes):
        pytest.fail("the block must not run")


def test_a_named_file_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPDCP_CONFIG", str(tmp_path / "none.toml"))
    with refused("HPDCP_CONFIG", "none.toml", "found none"):
        current()


@pytest.mark.parametrize("content", [b"backend = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    monkeypatch.setenv("HPDCP_CONFIG", str(path))
    with refused("bad.toml", "readable TOML"):
        current()


def test_a_folder_in_the_place_of_the_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPDCP_CONFIG", str(tmp_path))
    with refused(tmp_path.name, "readable TOML"):
        current()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("512MB", 512 * 10**6),
        ("1.5 GiB", 3 << 29),
        ("7B", 7),
        ("2kib", 2048),
        ("1TB", 10**12),
        ("1PiB", 1 << 50),
        (5, 5),
        (5.0, 5),
    ],
)
def test_sizes_are_numbers_or_text_with_a_unit(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5", "0.3B", "1 XB", "1e3", True, -1, 1.5, float("inf"), None])
def test_what_is_not_a_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the message is the caller's to write
        parse_size(text)


@pytest.mark.parametrize("word", ["true", "1", "Yes", "on"])
def test_flags_are_words_in_the_environment(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("HPDCP_ALLOW_PICKLE", word)
    assert current().allow_pickle is True


def test_sizes_and_durations_are_text_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPDCP_ASYNC_STAGING_BUDGET", "512MiB")
    monkeypatch.setenv("HPDCP_GROUP_TIMEOUT", "2.5")
    assert (current().async_staging_budget, current().group_timeout) == (512 << 20, 2.5)
    monkeypatch.setenv("HPDCP_ASYNC_STAGING_BUDGET", "auto")
    assert current().async_staging_budget is None


def test_what_looks_like_a_secret_is_masked_where_it_is_shown() -> None:
    options = {"key": "AKIA", "secret": "s3cr3t", "client_kwargs": {"aws_session_token": "s3cr3t"}, "anon": False}
    with using(backends={"s3": {"storage_options": options}}, routes=[{"prefix": "/a", "options": {"password": "pw"}}]):
        shown = {setting.key: setting.shown for setting in effective()}
    assert not any(secret in text for secret in ("AKIA", "s3cr3t", "pw") for text in shown.values())
    assert shown["backends.s3.storage_options.anon"] == "False"
    assert Setting("backends.s3.storage_options.endpoint", "http://x", "").shown == "'http://x'"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("connection_string", "AccountName=a;AccountKey=s3cr3t"),
        ("s3_additional_kwargs", {"SSECustomerKey": "s3cr3t"}),
        ("client_kwargs", {"headers": {"Authorization": "Bearer s3cr3t"}}),
        ("passphrase", "s3cr3t"),
        ("pkey", "s3cr3t"),
        ("endpoint_url", "https://user:s3cr3t@objects.example.org"),
        ("config_kwargs", {"proxies": {"https": "http://user:s3cr3t@proxy:3128"}}),
        ("tokens", ["s3cr3t"]),
    ],
)
def test_secrets_of_stores_and_passwords_in_urls_are_masked(key: str, value: object) -> None:
    with using(backends={"fsspec": {"storage_options": {key: value}}}):
        shown = {setting.key: setting.shown for setting in effective()}
    assert "s3cr3t" not in shown[f"backends.fsspec.storage_options.{key}"]


def test_the_password_in_the_prefix_of_a_route_is_masked() -> None:
    with using(routes=[{"prefix": "sftp://user:s3cr3t@host/run", "backend": "fsspec"}]):
        (shown,) = (setting.shown for setting in effective() if setting.key == "routes[0]")
    assert "s3cr3t" not in shown
    assert "sftp://***@host/run" in shown


def test_a_secret_in_the_wrong_place_is_not_repeated_in_the_error() -> None:
    with pytest.raises(InvalidArgumentError) as caught, using(backend={"secret": "s3cr3t"}):  # type: ignore[arg-type]
        pytest.fail("the block must not run")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("variable", ["HPDCP_BACKENDS_S3_READ_IN_FLIGHT", "HPDCP_S3_READ_IN_FLIGHT"])
def test_one_underscore_where_two_belong_is_told(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, "4")
    current()
    assert re.search(f"{variable}.*two underscores: HPDCP_BACKENDS__S3__", caplog.text)
