"""An endpoint of S3 without http:// is told by where it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._files import registry

pytest.importorskip("botocore")


@pytest.fixture(autouse=True)
def no_settings_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def refused(**storage_options: Any) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        registry.open_backend("s3://bucket/run", storage_options={"anon": True, **storage_options}).list_keys()
    return str(caught.value)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_variable_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "127.0.0.1:9")
    assert refused() == (
        f"environment variable {variable} is '127.0.0.1:9': http:// or https:// is missing in front of it."
    )


def test_the_option_is_named_and_goes_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    message = refused(endpoint_url="me:hidden@localhost:9000")
    assert message.startswith("storage_options endpoint_url is '***@localhost:9000': http:// or https:// is missing")


def test_the_file_of_aws_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = localhost:9000\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert refused().startswith("endpoint_url in the configuration of AWS is 'localhost:9000': http:// or")
