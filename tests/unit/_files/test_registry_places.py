"""What people write as a place, and which one place it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._files.registry import resolve_checkpoint_id


class Text(str):
    """As numpy and others make them."""


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("S3://Bucket/Run/", "s3://Bucket/Run"),
        ("s3://bucket//run///step", "s3://bucket/run/step"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3a://bucket/x", "s3a://bucket/x"),
        ("s3://bucket/a::b#1?x=[1]%20 ü*", "s3://bucket/a::b#1?x=[1]%20 ü*"),
        ("memory://", "memory://"),
        ("memory:///a", "memory:///a"),
        ("gs://bucket/~/x", "gs://bucket/~/x"),
        ("ftp://me:secret@host/x/", "ftp://me:secret@host/x"),
        ("cupboard://left/top", "cupboard://left/top"),
        ("file:///data/run/", "/data/run"),
        ("FILE:///data/run", "/data/run"),
        ("local:///data/run", "/data/run"),
        ("file://localhost/data/run", "/data/run"),
        ("file:///data/a%20b#1", "/data/a%20b#1"),
        ("/data//run/", "/data/run"),
        ("//data/run", "/data/run"),
        (Text("/data/run"), "/data/run"),
        (Path("/data/run"), "/data/run"),
    ],
)
def test_a_place_has_one_name_however_it_is_written(written: Any, meant: str) -> None:
    found = resolve_checkpoint_id(written)
    assert found == meant
    assert type(found) is str
    assert resolve_checkpoint_id(found) == found


@pytest.mark.parametrize("name", ["a::b", "x::y/z", "::", "weird:name", "s3:", "a::b::c", "C:x"])
def test_a_local_name_with_colons_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint_id(name) == f"{tmp_path}/{name}"
    assert resolve_checkpoint_id(f"{tmp_path}/{name}") == f"{tmp_path}/{name}"


def test_a_home_folder_and_a_relative_path_are_resolved_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve_checkpoint_id("~/run") == "/home/me/run"
    assert resolve_checkpoint_id(Path("~/run")) == "/home/me/run"
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint_id("run/step") == f"{tmp_path}/run/step"
    assert resolve_checkpoint_id(".") == str(tmp_path)


def test_dots_after_a_symbolic_link_lead_where_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    assert resolve_checkpoint_id(f"{tmp_path}/link/../run") == os.path.realpath(tmp_path / "far" / "run")
    assert resolve_checkpoint_id(f"{tmp_path}/link/run") == f"{tmp_path}/link/run"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("", "expected a path or a URL"),
        ("  ", "expected a path or a URL"),
        ("a\0b", "expected a path or a URL"),
        (b"bytes", "bytes"),
        (None, "NoneType"),
        (7, "int"),
        (Path("s3://bucket/x"), "pathlib"),
        (Path("memory://x"), "pathlib"),
        ("s3://", "no bucket"),
        ("s3:///run", "no bucket"),
        ("gs://", "no bucket"),
        ("sftp:///run", "no bucket or host"),
        ("s3://bucket/../other", r"'\.\.'"),
        ("s3://bucket/./x", r"'\.'"),
        ("file://host/x", "names a host"),
        ("file://relative", "relative path"),
        ("file://", "absolute path"),
        ("simplecache::s3://bucket/x", "chain"),
        ("filecache::/data/x", "chain"),
        ("zip::/data/x.zip", r"\./zip::/data/x\.zip"),
        ("zip://inner::s3://bucket/x.zip", "chain"),
        ("s3://bucket/x::file:///y", "chain"),
    ],
)
def test_what_is_no_place_is_refused_and_says_why(written: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        resolve_checkpoint_id(written)


@pytest.mark.parametrize("written", ["ftp://me:secret@host/../x", "cached::ftp://me:secret@host/x"])
def test_a_password_is_not_shown(written: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        resolve_checkpoint_id(written)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["s3:/bucket/run", "gs:/bucket", "file:/data/run"])
def test_a_url_with_one_slash_is_refused_and_a_folder_of_that_name_is_not(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError, match="two slashes"):
        resolve_checkpoint_id(text)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint_id(f"./{text}") == str(tmp_path / text)
