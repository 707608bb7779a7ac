"""The configuration's reference page is what the docstrings say, and what it shows works."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpdcp._base import config
from hpdcp._files import registry
from tests.support.ranks import ROOT

_SCRIPT = ROOT / "docs/reference/make_configuration.py"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HPDCP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPDCP_CONFIG", "")


def arguments(code: str) -> Any:
    """Of the call of `using` that the page shows."""
    return eval("dict" + code.removeprefix("with hpdcp.config.using").removesuffix(":"))


def test_the_page_is_what_the_docstrings_say(maker: ModuleType) -> None:
    written, expected = maker.PAGE.read_text().splitlines(), maker.page().splitlines()
    differing = [line for line in expected if line not in written] or [line for line in written if line not in expected]
    assert written == expected, f"run `{maker.COMMAND}` and commit {maker.PAGE.name}; differing: {differing[:5]}"


def test_every_key_has_a_docstring_an_example_and_a_place_on_the_page(maker: ModuleType) -> None:
    page = maker.page()
    documented = maker._field_docs(config.Config)
    for field in dataclasses.fields(config.Config):
        assert documented[field.name].strip(), field.name
    names = {field.name for field in dataclasses.fields(config.Config)}
    assert {*maker.EXAMPLES, "routes", "backends", "layouts"} == names
    assert re.findall(r"^### `(\w+)`$", page.partition("## Tables")[0], re.MULTILINE) == list(maker.EXAMPLES)


@pytest.mark.parametrize("form", ["File", "Environment", "Code"])
def test_what_the_page_shows_for_a_key_is_accepted_and_means_the_example(
    maker: ModuleType, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = re.findall(rf"^\| {form} \| `(.*)` \|$", maker.page().partition("## Tables")[0], re.MULTILINE)
    assert len(shown) == len(maker.EXAMPLES)
    for text, (key, example) in zip(shown, maker.EXAMPLES.items(), strict=True):
        with monkeypatch.context() as patch:
            if form == "File":
                (tmp_path / "one.toml").write_text(text)
                patch.setenv("HPDCP_CONFIG", str(tmp_path / "one.toml"))
                found = config.current()
            elif form == "Environment":
                patch.setenv(*text.split("=", 1))
                found = config.current()
            else:
                with config.using(**arguments(text)) as found:
                    pass
        meant = config.parse_size(example) if key == "async_staging_budget" else example
        assert getattr(found, key) == meant, text
        assert config.current() == config.Config()


def test_what_the_page_shows_of_tables_is_accepted(maker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = maker.page().partition("## Tables")[2]
    for line in re.findall(r"^\| Environment \| (.*) \|$", page, re.MULTILINE):
        for text in re.findall(r"`([^`]*)`", line):
            monkeypatch.setenv(*text.split("=", 1))
    found = config.current()
    assert found.routes[0].options.tunables == {"read_in_flight": 8}
    assert found.backends["s3"] == config.BackendSettings({"read_in_flight": 32}, {"anon": True})
    for text in re.findall(r"^\| Code \| `(.*)` \|$", page, re.MULTILINE):
        with config.using(
            **eval(text.removeprefix("with hpdcp.config.using").removesuffix(":").replace("(", "dict(", 1))
        ):
            pass


def test_the_example_file_is_accepted_and_names_tunables_that_exist(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```$", maker.page(), re.MULTILINE | re.DOTALL)
    (tmp_path / "hpdcp.toml").write_text(block)
    monkeypatch.setenv("HPDCP_CONFIG", str(tmp_path / "hpdcp.toml"))
    found = config.current()
    assert found.backends["s3"].tunables == {"read_in_flight": 32, "part_bytes": 32 << 20}
    for backend, url in (("s3", "s3://archive/step"), ("s3", "s3://else"), ("nfs", "/mnt/shared/checkpoints/step")):
        settings = found.settings_for(backend, url)
        assert settings.tunables, url
        assert set(settings.tunables) <= set(maker.tunables(registry._find(backend, "backend", registry._BACKENDS, "")))


def test_every_backend_and_every_tunable_is_on_the_page(maker: ModuleType) -> None:
    page = maker.page().partition("## Backends")[2]
    assert re.findall(r"^### `(\w+)`$", page, re.MULTILINE) == list(registry._BACKENDS)
    for name in registry._BACKENDS:
        section = page.partition(f"### `{name}`")[2].partition("\n### ")[0]
        known = maker.tunables(registry._find(name, "backend", registry._BACKENDS, ""))
        assert re.findall(r"^\| `(\w+)` \| `\S.*` \| .* \| \S.* \|$", section, re.MULTILINE) == list(known)
        for tunable, parameter in known.items():
            assert parameter.default is not parameter.empty, f"{name}: {tunable} has no default"
            json.dumps(parameter.default)
