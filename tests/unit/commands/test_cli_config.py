"""`hpdcp config show`: what it shows of each key, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpdcp._base import config
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._files import registry
from tests.support.command import Command


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPDCP_CONFIG", str(tmp_path / "hpdcp.toml"))
    return tmp_path / "hpdcp.toml"


def values(command: Command) -> dict[str, Any]:
    return {each["key"]: each["value"] for each in command("config", "show", "--json").document}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[backends.s3]\nread_in_fligt = 3", "'backends.s3.read_in_fligt': backend 's3' has no setting"),
        ("[backends.S3]\nread_in_flight = 3", "no backend is called 'S3'"),
        ("[layouts.zarr]\ncompresor = 'zstd'", "'layouts.zarr.compresor': layout 'zarr' has no setting"),
        ("[layouts.Zarr]\ncompressor = 'zstd'", "Did you mean 'zarr'?"),
        (
            "[[routes]]\nprefix = 's3://b'\noptions = { read_in_fligt = 3 }",
            "'routes[0].options.read_in_fligt': backend 's3' has no setting",
        ),
        (
            "[[routes]]\nprefix = '/data'\nbackend = 'nfs'\noptions = { nonsense = 3 }",
            "'routes[0].options.nonsense': backend 'nfs' has no setting",
        ),
        ("[[routes]]\nprefix = '/data'\noptions = { nonsense = 3 }", "'routes[0].options.nonsense'"),
        ("[[routes]]\nprefix = '/data'\nbackend = 'nsf'", "Did you mean 'nfs'?"),
    ],
)
def test_misspelt_settings_of_backends_and_layouts_are_refused(
    text: str, says: str, file: Path, command: Command
) -> None:
    file.write_text(text)
    message = command("config", "show", status=2).err
    assert says in message
    assert message.count("\n") == 1


def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("HPDCP_BACKENDS__S3__READ_IN_FLIHT", "3")
    message = command("config", "show", status=2).err
    assert "HPDCP_BACKENDS__S3__READ_IN_FLIHT" in message
    assert "Did you mean 'read_in_flight'?" in message


def test_what_one_of_the_backends_of_a_prefix_takes_passes(file: Path, command: Command) -> None:
    file.write_text(
        "[[routes]]\nprefix = '/data'\noptions = { max_open_files = 4 }\n[backends.s3]\nread_in_flight = 3\n"
    )
    assert values(command)["backends.s3.read_in_flight"] == 3


def test_values_of_the_document_are_values(file: Path, command: Command) -> None:
    file.write_text(
        "verify = 'always'\ngroup_timeout = 5\n[[routes]]\nprefix = 's3://user:secret@b'\n"
        "[backends.s3.storage_options]\nkey = 'me'\nsecret = 'tell-nobody'\nanon = false\n"
        "client_kwargs = { aws_secret_access_key = 'tell-nobody', since = 2026-01-01, limit = inf }\n"
    )
    found = values(command)
    assert (found["verify"], found["group_timeout"], found["allow_pickle"]) == ("always", 5.0, False)
    assert found["async_staging_budget"] is None
    assert found["backends.s3.storage_options.anon"] is False
    assert found["backends.s3.storage_options.secret"] == "***"
    assert found["backends.s3.storage_options.client_kwargs"] == {
        "aws_secret_access_key": "***", "since": "2026-01-01", "limit": "inf",
    }  # fmt: skip
    assert found["routes[0]"] == {"prefix": "s3://***@b", "backend": "auto", "options": {}}
    assert "tell-nobody" not in command("config", "show").out


def test_tables_that_are_not_set_are_shown_empty(command: Command) -> None:
    found = values(command)
    assert (found["routes"], found["backends"], found["layouts"]) == ([], {}, {})


def test_the_file_is_named_by_an_absolute_path(file: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    file.write_text("verify = 'always'")
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv("HPDCP_CONFIG", file.name)
    found = {each["key"]: each["origin"] for each in command("config", "show", "--json").document}
    assert found["verify"] == str(file)


def test_a_backend_that_is_not_known_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with config.using(backend="NFS"), pytest.raises(InvalidArgumentError, match="Did you mean 'nfs'"):
        registry.open_backend(str(tmp_path))
