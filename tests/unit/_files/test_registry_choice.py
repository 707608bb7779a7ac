"""Which backend a place gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsspec.registry import known_implementations

import hpdcp
from hpdcp._base import config
from hpdcp._base.errors import InvalidArgumentError, NotSupportedError
from hpdcp._files import registry
from hpdcp_backends.generic import GenericBackend
from hpdcp_backends.local import LocalBackend


def opened(url: str, **options: object) -> hpdcp.backend.Backend:
    return registry.open_backend(registry.resolve_checkpoint_id(url), **options)  # type: ignore[arg-type]


def test_the_mount_table_decides_about_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(registry, "is_nfs", lambda path: bool(asked.append(path)))
    assert type(opened(f"file://{tmp_path}")) is LocalBackend
    assert asked == [str(tmp_path)]
    assert registry._by_place("/somewhere") == "local"
    monkeypatch.setattr(registry, "is_nfs", lambda path: True)
    assert registry._by_place("/somewhere") == "nfs"


@pytest.mark.parametrize(
    ("url", "name"), [("s3://b/x", "s3"), ("s3a://b/x", "s3"), ("memory://x", "fsspec"), ("gs://b/x", "fsspec")]
)
def test_the_scheme_decides_about_a_url(url: str, name: str) -> None:
    assert registry._by_place(url) == name


def test_a_backend_named_in_the_configuration_goes_before_routes_and_these_before_the_scheme(tmp_path: Path) -> None:
    route = {"prefix": str(tmp_path), "backend": "fsspec", "options": {"requests": 3}}
    with config.using(routes=[route]):
        assert type(opened(f"{tmp_path}/x")) is GenericBackend
        assert type(opened(f"{tmp_path}x")) is LocalBackend
        with config.using(backend="local"):
            assert type(opened(f"{tmp_path}/x")) is LocalBackend
            assert type(opened(f"{tmp_path}/x", name="fsspec")) is GenericBackend


def test_a_route_without_a_backend_gives_options_to_the_one_the_scheme_chooses() -> None:
    with (
        config.using(routes=[{"prefix": "memory://here", "options": {"requests": 0}}]),
        pytest.raises(InvalidArgumentError, match="requests is 0"),
    ):
        opened("memory://here/x")


@pytest.mark.parametrize(("url", "near"), [("s4://b/x", "s3://"), ("gcss://b", "gcs://"), ("sfpt://h/x", "sftp://")])
def test_an_unknown_scheme_is_named_with_what_is_near_and_what_is_known(url: str, near: str) -> None:
    with pytest.raises(InvalidArgumentError, match=url) as caught:
        opened(url)
    hint = str(caught.value).partition("Did you mean ")[2].partition("?")[0]
    assert near in hint
    assert "abfs" in str(caught.value)
    assert "simplecache" not in str(caught.value)


def test_a_missing_package_is_named_as_fsspec_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "no_such_package.FileSystem", "err": "Please install lost-and-found"}
    monkeypatch.setitem(known_implementations, "lost", entry)
    with pytest.raises(NotSupportedError, match=r"lost://bucket/x.*Please install lost-and-found"):
        opened("lost://bucket/x")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"fsspec.*local.*nfs.*s3"):
        opened("/x", name="nosuch")


def test_settings_that_a_backend_does_not_take_are_named() -> None:
    with config.using(backends={"fsspec": {"colour": "red"}}), pytest.raises(InvalidArgumentError, match="colour"):
        opened("memory://x")


@pytest.mark.parametrize("url", ["memory://Run/step", "memory://", "/data/run", "memory://a b/#1"])
def test_a_backend_and_a_writer_call_a_place_the_same(url: str) -> None:
    place = registry.resolve_checkpoint_id(url)
    assert hpdcp.FileSystemWriter(url).place == place
    assert opened(url).url == place
    assert GenericBackend(place).url == place
