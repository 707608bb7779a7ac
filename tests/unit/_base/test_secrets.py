"""Secrets are masked in every text that people read: by the shape of URLs, by name, and by value."""

from __future__ import annotations

import logging

import pytest

from hpdcp._base import config
from hpdcp._base._secrets import masked_url, remember, scrubbed
from hpdcp._base.errors import InvalidArgumentError, StorageError
from hpdcp._base.timing import log_message
from hpdcp._convert._location import Location
from hpdcp._files import registry

SECRET = "tell-nobody-42"


@pytest.mark.parametrize(
    "url",
    [
        f"https://user:{SECRET}@host/x",
        f"https://user:p@{SECRET}@host/x",
        f"https://{SECRET}@host/x",
        f"https://{SECRET}:@host:9000",
        f"sftp://{SECRET}:x-oauth-basic@host/x",
        f"https:/user:{SECRET}@host",
        f"s3:/{SECRET}@bucket/run",
        f"https://host/x?token={SECRET}",
        f"https://host/x?a=1&sig={SECRET}&versionId=7",
        f"https://host/x?X-Amz-Signature={SECRET}",
        f"cannot open 'https://user:{SECRET}@host/x': no such host",
        f"abfss://container@account/x?sig={SECRET}",
    ],
)
def test_urls_are_masked_by_their_shape(url: str) -> None:
    assert SECRET not in masked_url(url)
    assert SECRET not in str(InvalidArgumentError(f"{url} is wrong"))
    assert SECRET not in repr(StorageError(url))


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a:b@c",
        "abfss://container@account.dfs.core.windows.net/run",
        "/data/run@3/step_1",
        "https://host/x?versionId=7",
        "write to team@example.org",
        "Did you mean 'a'? x = 3",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrubbed(text) == text


@pytest.mark.parametrize(
    "name",
    [
        "pat", "auth", "bearer", "pwd", "jwt", "oauth", "sig", "headers", "session", "secret", "token", "password",
        "key", "sas_token", "connection_string", "aws_session_token", "username", "id", "anything-new",
    ],
)  # fmt: skip
def test_text_is_shown_under_known_names_only(name: str) -> None:
    options = {name: SECRET, "client_kwargs": {name: [SECRET]}, "endpoint_url": f"https://u:{SECRET}@h:9000"}
    with config.using(backends={"s3": {"storage_options": options, "endpoint_url": f"https://h?token={SECRET}"}}):
        shown = [repr(config.current()), *map(repr, config.effective()), *(s.shown for s in config.effective())]
    shown.append(repr(config.Route("s3://b", options=config.BackendSettings({}, options))))
    shown.append(repr(Location("s3://b", storage_options=options)))
    assert not [text for text in shown if SECRET in text]
    assert any("h:9000" in text for text in shown)


def test_numbers_and_known_words_are_shown() -> None:
    options = {"anon": False, "part_bytes": 5 << 20, "use_ssl": True, "region": "eu-west-1", "password": 123456}
    with config.using(backends={"s3": {"storage_options": options}}):
        shown = repr(config.current())
    assert "eu-west-1" in shown and str(5 << 20) in shown and "123456" not in shown


@pytest.mark.parametrize("quoted", [SECRET, repr(SECRET), f"Invalid header value b'{SECRET}\\n'"])
def test_values_of_options_are_masked_wherever_a_store_quotes_them(
    quoted: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidArgumentError, match="no backend"):
        registry.open_backend("nowhere://x", name="none", storage_options={"token": f"{SECRET}\n"})
    remember({"token": f"{SECRET}\n"})
    assert SECRET not in str(StorageError(f"the store says: {quoted}"))
    with caplog.at_level(logging.WARNING):
        log_message(logging.WARNING, f"trying again after {quoted}")
    assert SECRET not in caplog.text


def test_short_values_are_not_looked_for() -> None:
    remember({"key": "a", "secret": "me"})
    assert scrubbed("name a me") == "name a me"
