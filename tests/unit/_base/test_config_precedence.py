"""Where configuration comes from: `using` over the environment over the file over the defaults."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from hpdcp._base import config
from hpdcp._base.config import BackendSettings, Config, Route, Settings, current, effective, using

WriteFile = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HPDCP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPDCP_CONFIG", "")


@pytest.fixture
def write_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteFile:
    def write(text: str) -> Path:
        path = tmp_path / "hpdcp.toml"
        path.write_text(text)
        monkeypatch.setenv("HPDCP_CONFIG", str(path))
        return path

    return write


def origins() -> dict[str, str]:
    return {setting.key: setting.origin for setting in effective()}


def test_without_anything_set_the_defaults_hold() -> None:
    assert current() == Config()
    assert set(origins().values()) == {"default"}


def test_each_source_wins_over_the_next(write_file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file('verify = "never"\nbroadcast = "never"\ncheck_replicas = "off"')
    monkeypatch.setenv("HPDCP_VERIFY", "always")
    monkeypatch.setenv("HPDCP_BROADCAST", "always")
    with using(broadcast="auto"):
        now = current()
        assert (now.broadcast, now.verify, now.check_replicas, now.backend) == ("auto", "always", "off", "auto")
        found = origins()
    assert found["broadcast"] == "hpdcp.config.using(...)"
    assert found["verify"] == "environment variable HPDCP_VERIFY"
    assert found["check_replicas"] == str(path)
    assert found["backend"] == "default"


def test_using_nests_and_ends_with_its_block() -> None:
    with using(backend="nfs", verify="always"):
        with using(backend="local") as inner:
            assert (inner.backend, inner.verify) == ("local", "always")
            assert inner == current()
        assert current().backend == "nfs"
    assert current() == Config()


def test_using_ends_when_its_block_raises() -> None:
    with pytest.raises(KeyError), using(backend="nfs"):
        raise KeyError
    assert current() == Config()


def test_using_does_not_reach_other_threads() -> None:
    seen: list[str] = []
    with using(backend="nfs"):
        thread = threading.Thread(target=lambda: seen.append(current().backend))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_the_default_file_is_read_where_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HPDCP_CONFIG")
    assert current() == Config()
    path = tmp_path / ".config" / "hpdcp" / "hpdcp.toml"
    path.parent.mkdir(parents=True)
    path.write_text('backend = "nfs"')
    assert current().backend == "nfs"
    assert origins()["backend"] == str(path)


def test_a_file_that_changes_is_read_again(write_file: WriteFile) -> None:
    write_file('backend = "one"')
    assert current().backend == "one"
    write_file('backend = "another"')
    assert current().backend == "another"


def test_backend_tables_are_merged_key_by_key(write_file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(
        """
        [backends.s3]
        coalesce_gap = "1MiB"
        max_read = 5
        storage_options = { anon = true, client_kwargs = { endpoint_url = "http://one", region_name = "eu" } }
        """
    )
    monkeypatch.setenv("HPDCP_BACKENDS__S3__COALESCE_GAP", "2097152")
    monkeypatch.setenv("HPDCP_BACKENDS__S3__STORAGE_OPTIONS__CLIENT_KWARGS__ENDPOINT_URL", "http://two")
    with using(backends={"s3": {"storage_options": {"anon": False}}, "nfs": {"read_threads": 2}}):
        assert current().backends == {
            "s3": BackendSettings(
                {"coalesce_gap": 2097152, "max_read": 5},
                {"anon": False, "client_kwargs": {"endpoint_url": "http://two", "region_name": "eu"}},
            ),
            "nfs": BackendSettings({"read_threads": 2}),
        }
        found = origins()
    assert found["backends.s3.max_read"] == str(path)
    assert found["backends.s3.coalesce_gap"] == "environment variable HPDCP_BACKENDS__S3__COALESCE_GAP"
    assert found["backends.s3.storage_options.anon"] == "hpdcp.config.using(...)"
    assert current().backends["s3"].storage_options["anon"] is True


def test_a_value_takes_the_place_of_a_table_and_an_empty_table_changes_nothing(write_file: WriteFile) -> None:
    write_file("[backends.s3.storage_options]\nconfig_kwargs = { retries = 3 }\ncache = { size = 1 }")
    with using(backends={"s3": {"storage_options": {"config_kwargs": None, "cache": {}}}, "nfs": {}}):
        assert current().backends == {
            "s3": BackendSettings({}, {"config_kwargs": None, "cache": {"size": 1}}),
            "nfs": BackendSettings(),
        }


def test_storage_options_pass_untouched() -> None:
    session = object()
    given = {"session": session, "pair": (1, 2), "size": "5MiB", "by_number": {1: "one"}}
    with using(backends={"s3": BackendSettings(storage_options=given)}):
        assert current().backends["s3"].storage_options == given
        assert current().backends["s3"].storage_options["session"] is session


def test_environment_values_of_backends_are_json_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = "HPDCP_BACKENDS__S3__STORAGE_OPTIONS"
    monkeypatch.setenv(prefix, '{"anon": true, "key": "from the table"}')
    monkeypatch.setenv(f"{prefix}__KEY", '"123456"')
    monkeypatch.setenv(f"{prefix}__SECRET", "NaN")
    monkeypatch.setenv(f"{prefix}__RETRIES", "3")
    monkeypatch.setenv("HPDCP_ROUTES", '[{"prefix": "s3://here/", "backend": "s3"}]')
    assert current().backends["s3"].storage_options == {"anon": True, "key": "123456", "secret": "NaN", "retries": 3}
    assert current().routes == (Route("s3://here/", "s3"),)


def test_routes_are_taken_whole_from_the_first_source_that_has_any(write_file: WriteFile) -> None:
    write_file('[[routes]]\nprefix = "/a"\nbackend = "nfs"\n[[routes]]\nprefix = "/b"\n')
    assert current().routes == (Route("/a", "nfs"), Route("/b"))
    with using(routes=[{"prefix": "/c", "options": {"gap": "1KiB", "storage_options": {"x": 1}}}, Route("/d", "s3")]):
        assert current().routes == (
            Route("/c", "auto", BackendSettings({"gap": 1024}, {"x": 1})),
            Route("/d", "s3"),
        )


def test_variables_that_are_not_keys_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HPDCP_RUN_ID", "HPDCP_TRACE", "HPDCP_TEST_ANYTHING"):
        monkeypatch.setenv(name, "x")
    assert current() == Config()


def test_the_longest_matching_prefix_decides_by_whole_components() -> None:
    routes = (Route("/data", "one"), Route("/data/deep/", "two"), Route("s3://", "three"), Route("~/ckpt", "four"))
    chosen = Config(routes=routes)

    def backend(url: str) -> str | None:
        route = chosen.route_for(url)
        return route and route.backend

    assert backend("/data/x") == backend("/data") == "one"
    assert backend("/data/deep/x") == backend("/data/deep") == "two"
    assert backend("/database") is None
    assert backend("s3://any/thing") == "three"
    assert backend(str(Path("~/ckpt/step").expanduser())) == "four"


def test_the_route_s_options_lie_over_the_backend_s_table() -> None:
    table = BackendSettings({"gap": 1, "threads": 2}, {"anon": True, "nested": {"a": 1}})
    options = BackendSettings({"gap": 9}, {"nested": {"b": 2}})
    chosen = Config(routes=(Route("s3://fast/", "s3", options),), backends={"s3": table})
    assert chosen.settings_for("s3", "s3://slow/x") == table
    assert chosen.settings_for("s3", "s3://fast/x") == BackendSettings(
        {"gap": 9, "threads": 2}, {"anon": True, "nested": {"a": 1, "b": 2}}
    )
    assert chosen.settings_for("other", "s3://fast/x") == BackendSettings()


def test_every_field_of_config_is_a_key_and_an_argument_of_using() -> None:
    names = {entry.name for entry in fields(Config)}
    assert names == set(config.KEYS) | {"routes", "backends", "layouts"}
    assert set(Settings.__annotations__) == names | set(config.RENAMED)
