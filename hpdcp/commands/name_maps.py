"""`--name-map FILE`: a table of names, and which of them met nothing."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import typer

from hpdcp.commands.output import count_of, note

if TYPE_CHECKING:
    from hpdcp._files.huggingface_names import TensorPart

_MOST_NAMES: Final = 5

Named: TypeAlias = "str | TensorPart | None"
Table: TypeAlias = dict[str, Named]


def read_name_map(text: str) -> Table:
    """A table of names: JSON, or TOML where the file is called so."""
    example = """{"old.name": "new.name"}"""
    try:
        data = Path(text).expanduser().read_text("utf-8")
        table: object = tomllib.loads(data) if text.lower().endswith(".toml") else json.loads(data)
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{text!r} cannot be read: {error}.") from None
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is neither JSON nor, by its name, TOML: {error}.") from None
    if not isinstance(table, dict):
        raise typer.BadParameter(f"{text!r} holds a {type(table).__name__}; expected one table, such as {example}.")
    return {name: _wanted(text, name, value) for name, value in table.items()}


def _wanted(file: str, name: str, value: object) -> Named:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict) and set(value) == {"name", "offsets"}:
        where, offsets = value["name"], value["offsets"]
        if isinstance(where, str) and isinstance(offsets, list) and all(type(each) is int for each in offsets):
            from hpdcp._files.huggingface_names import TensorPart

            return TensorPart(where, tuple(offsets))
    quoted = f' In TOML, a name with dots is quoted: "{name}.…" = "…".' if isinstance(value, dict) else ""
    raise typer.BadParameter(
        f"{file!r} maps {name!r} to {json.dumps(value, default=str)[:80]}; expected another name, null (JSON) to "
        f'leave it out, or {{"name": …, "offsets": […]}} for a part of a larger tensor.{quoted}'
    )


class NameTable:
    """A table of names as a function, which knows what was never asked for: a typing error in a name, mostly."""

    def __init__(self, table: Table | None) -> None:
        self._table = table
        self._asked: set[str] = set()

    @property
    def part_of(self) -> Callable[[str], Named] | None:
        """As conversions into checkpoints take it."""
        return None if self._table is None else self._find

    @property
    def name_of(self) -> Callable[[str], str | None] | None:
        """As conversions into folders take it.

        Raises:
            typer.BadParameter: the table speaks of parts.
        """
        if self._table is None:
            return None
        from hpdcp._files.huggingface_names import TensorPart

        part = next((name for name, value in self._table.items() if isinstance(value, TensorPart)), None)
        if part is not None:
            raise typer.BadParameter(f"--name-map makes {part!r} a part of a larger tensor; expected a name.")

        def name_of(name: str) -> str | None:
            found = self._find(name)
            assert not isinstance(found, TensorPart)
            return found

        return name_of

    def _find(self, name: str) -> Named:
        assert self._table is not None
        self._asked.add(name)
        return self._table.get(name, name)

    def tell_of_unused(self, src: str) -> None:
        """Say which names of the table `src` does not hold."""
        unused = [name for name in self._table or () if name not in self._asked]
        if unused:
            named = ", ".join(map(repr, unused[:_MOST_NAMES])) + (", …" if len(unused) > _MOST_NAMES else "")
            note(f"{count_of(len(unused), 'name')} of --name-map met no tensor of {src}: {named}.")
