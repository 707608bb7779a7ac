"""Writes commands.md beside it, from what each command and each option says of itself: `make docs`.

`tests/unit/commands/test_command_reference.py` compares the page with what this would write.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import typer
from typer.models import ArgumentInfo

from hpdcp import cli
from hpdcp.commands import app

PAGE: Final = Path(__file__).with_name("commands.md")
COMMAND: Final = "make docs"
ABOUT: Final = """\
The commands need `pip install "hpdcp[cli]"`; `python -m hpdcp` is the same as `hpdcp`. Results go to stdout, bars and
errors to stderr. `NO_COLOR` turns colours off, and a pipe never gets any.

`hpdcp convert` shares its work among the processes that torchrun starts: `torchrun --nproc-per-node=8 -m hpdcp convert
hf-to-dcp SRC DST`. Of any other command rank 0 alone does the work. Only rank 0 prints.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([*_head(), *_group(app, "hpdcp"), *_exit_statuses()]).rstrip() + "\n"


def commands(group: typer.Typer, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command, as it is typed, and its function."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{name} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from commands(below.typer_instance, f"{name} {below.name}")


def _head() -> Iterator[str]:
    yield "# Commands"
    yield ""
    yield f"<!-- Written by {Path(__file__).name} from docstrings: change those, then run `{COMMAND}`. -->"
    yield ""
    yield ABOUT


def _group(group: typer.Typer, name: str) -> Iterator[str]:
    for command, function in commands(group, name):
        rows = list(_rows(function))
        arguments = [said for said, _ in rows if not said.startswith("`-")]
        yield f"## `{' '.join([command, *(said.strip('`') for said in arguments)])}`"
        yield ""
        yield " ".join((inspect.getdoc(function) or "").split())
        yield ""
        yield "| | |"
        yield "| --- | --- |"
        yield from (f"| {said} | {meaning} |" for said, meaning in rows)
        yield ""


def _rows(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, info = typing.get_args(hints[name])
        if isinstance(info, ArgumentInfo):
            yield f"`{info.metavar}`", _cell(info.help or "")
            continue
        # Of several, typer takes the first for a default, until it meets the function's own.
        given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
        flags = ", ".join(f"`{_cell(flag + _value(kind, info))}`" for flag in given)
        yield flags, _cell(info.help or "") + _default(parameter.default)


def _value(kind: Any, info: Any) -> str:
    if kind is bool:
        return ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " " + "|".join(str(each.value) for each in kind)
    return f" {info.metavar or 'TEXT'}"


def _default(given: object) -> str:
    if given is None or given is False or given in ("", 0.0):
        return ""
    return f" Default `{given.value if isinstance(given, Enum) else given}`."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def exit_statuses() -> dict[int, str]:
    """What `hpdcp.cli.main` says of each."""
    told = " ".join((cli.main.__doc__ or "").partition("Status ")[2].split())
    return {int(status): meaning for status, meaning in re.findall(r"(\d+): (.*?)\.(?= \d+: | An error)", told)}


def _exit_statuses() -> Iterator[str]:
    yield "## Exit status"
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    yield from (f"| {status} | {meaning} |" for status, meaning in exit_statuses().items())
    yield ""
    yield "torchrun itself exits with 1 whenever one of its processes fails, whatever that one exits with."


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
