"""The reference page of the commands is what the commands say of themselves."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from hpdcp.commands import app
from tests.support.command import Command
from tests.support.ranks import ROOT

_SCRIPT = ROOT / "docs/reference/make_commands.py"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_commands", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_commands_say(maker: ModuleType) -> None:
    written, expected = maker.PAGE.read_text().splitlines(), maker.page().splitlines()
    differing = [line for line in expected if line not in written] or [line for line in written if line not in expected]
    assert written == expected, f"run `{maker.COMMAND}` and commit {maker.PAGE.name}; differing: {differing[:5]}"


def test_every_option_that_a_command_names_in_its_help_is_on_the_page(maker: ModuleType, command: Command) -> None:
    sections = dict(
        re.findall(r"^## `(hpdcp [a-z -]*[a-z])[^`]*`\n(.*?)(?=^## )", maker.page(), re.MULTILINE | re.DOTALL)
    )
    named = [name for name, _ in maker.commands(app, "hpdcp")]
    assert list(sections) == named
    for name in named:
        told = command(*name.split()[1:], "--help").out
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*(?![\w-])", told.partition("Options:")[2])) - {"--help"}
        assert flags <= set(re.findall(r"--[a-z][a-z-]*", sections[name])), name
        assert set(re.findall(r"^\| `(--[a-z-]+)", sections[name], re.MULTILINE)) <= flags, name
        assert re.search(r"^\|  \|", sections[name], re.MULTILINE) is None, f"{name} has an option without a name"


def test_every_exit_status_is_explained(maker: ModuleType) -> None:
    assert list(maker.exit_statuses()) == [0, 1, 2, 3, 130]
