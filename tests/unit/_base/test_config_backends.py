"""Settings of backends: the error about one says where it was set, and routes match as people write them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpdcp._base.config import BackendSettings, Route, current, origin_of, settings_at, using
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._files import registry


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HPDCP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPDCP_CONFIG", "")


def refused(*parts: str) -> Any:
    return pytest.raises(InvalidArgumentError, match="(?s)" + ".*".join(parts))


def configure(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "mine.toml").write_text(text)
    monkeypatch.setenv("HPDCP_CONFIG", str(folder / "mine.toml"))


def test_a_setting_that_the_backend_does_not_have_names_file_key_and_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, monkeypatch, "[backends.local]\nread_thread = 3")
    expected = ("mine.toml", r"'backends\.local\.read_thread'", "Did you mean 'read_threads'", "Known: .*block_bytes")
    with refused(*expected):
        registry.open_backend(str(tmp_path))


def test_a_setting_that_the_backend_does_not_have_names_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPDCP_BACKENDS__LOCAL__URL", "/elsewhere")
    with refused("HPDCP_BACKENDS__LOCAL__URL", r"'backends\.local\.url'", "has no setting 'url'"):
        registry.open_backend(str(tmp_path))


def test_a_setting_of_a_route_that_the_backend_does_not_have_names_the_route(tmp_path: Path) -> None:
    routes = [{"prefix": "/elsewhere"}, {"prefix": str(tmp_path), "options": {"zebra": 1}}]
    with using(routes=routes), refused("using", r"'routes\[1\]\.options\.zebra'", "has no setting 'zebra'"):
        registry.open_backend(str(tmp_path / "step"))


@pytest.mark.parametrize("value", ["-1", "many", "null"])
def test_a_value_that_the_backend_refuses_names_where_it_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HPDCP_BACKENDS__LOCAL__MAX_OPEN_FILES", value)
    with refused(r"backends\.local\.max_open_files = ", "HPDCP_BACKENDS__LOCAL__MAX_OPEN_FILES"):
        registry.open_backend(str(tmp_path))


def test_a_secret_among_options_that_are_refused_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, monkeypatch, '[backends.local.storage_options]\nsecret = "s3cr3t"')
    with refused("storage_options.secret", "mine.toml") as caught:
        registry.open_backend(str(tmp_path))
    assert "s3cr3t" not in str(caught.value)


def test_a_table_for_a_backend_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(tmp_path, monkeypatch, "[backends.locl]\nread_threads = 3")
    with refused("mine.toml", r"'backends\.locl'", "known are", "'local'"):
        registry.open_backend(str(tmp_path))


def test_settings_at_a_url_are_those_of_the_table_under_those_of_the_route() -> None:
    table = {"a": 1, "b": 2, "storage_options": {"x": 1, "y": 2}}
    routes = [Route("s3://fast", "s3", BackendSettings({"b": 3}, {"y": {"z": 4}})), Route("s3://gs", "fsspec")]
    with using(backends={"s3": table}, routes=routes):
        fast, slow = settings_at("s3", "s3://fast/step"), settings_at("s3", "s3://slow/step")
        other = settings_at("s3", "s3://gs/step")
        assert {key: setting.value for key, setting in fast.items()} == {
            "a": 1,
            "b": 3,
            "storage_options.x": 1,
            "storage_options.y": {"z": 4},
        }
        assert fast["b"].key == "routes[0].options.b"
        assert fast["a"].key == "backends.s3.a"
        assert fast["storage_options.y"].key == "routes[0].options.storage_options.y"
        assert {key: setting.value for key, setting in slow.items()} == flat(table)
        assert other == slow
        assert current().settings_for("s3", "s3://fast/step").tunables == {"a": 1, "b": 3}
    assert settings_at("s3", "s3://fast/step") == {}


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    options = {f"storage_options.{key}": value for key, value in table["storage_options"].items()}
    return {key: value for key, value in table.items() if key != "storage_options"} | options


def test_the_origin_of_a_key_or_table_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPDCP_BACKENDS__S3__GAP", "1")
    with using(verify="always"):
        assert origin_of("verify") == "hpdcp.config.using(...)"
        assert origin_of("backends", "s3") == "environment variable HPDCP_BACKENDS__S3__GAP"
        assert origin_of("backends", "nfs") == origin_of("layout") == origin_of("layout", "x") == "default"


@pytest.mark.parametrize(
    ("prefix", "url", "matches"),
    [
        ("file:///data", "/data/x", True),
        ("FILE:///data/", "/data", True),
        ("S3://bucket", "s3://bucket/x", True),
        ("s3://Bucket", "s3://bucket/x", False),
        ("s3://bucket", "s3://bucket2/x", False),
        ("~/checkpoints", os.path.expanduser("~/checkpoints/x"), True),
        ("/data", "s3://bucket/data/x", False),
    ],
)
def test_a_prefix_matches_however_the_scheme_is_written(prefix: str, url: str, matches: bool) -> None:
    assert Route(prefix).matches(url) is matches
