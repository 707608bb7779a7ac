"""Arguments and options that several commands take, each defined once."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

_EXAMPLE = """{"anon": true}"""


class ShowBar(StrEnum):
    """When to show a bar, as `hpdcp.progress.bar` takes it."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def read_storage_options(text: str) -> dict[str, Any]:
    """Storage options as they are given on a command line: JSON, or `@` and a file of it. Values may be secrets."""
    where = "the text"
    if text.startswith("@"):
        where = text[1:]
        try:
            text = Path(where).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{where!r} cannot be read: {error}. Expected a file of JSON.") from None
    try:
        options = json.loads(text)
    except ValueError as error:
        reason = str(error)
        raise typer.BadParameter(f"{where} is not JSON ({reason}): expected an object, such as '{_EXAMPLE}'.") from None
    if not isinstance(options, dict):
        kind = type(options).__name__
        raise typer.BadParameter(f"{where} is JSON, but a {kind}: expected an object, such as '{_EXAMPLE}'.")
    return options


def backend_option(flag: str, whose: str) -> Any:
    """An option that names the backend of one location."""
    return typer.Option(
        flag, metavar="NAME", help=f"Use this as {whose}, in place of the configured one: local, nfs, s3, fsspec…"
    )


def storage_options_option(flag: str, whose: str) -> Any:
    """An option that takes the storage options of one location."""
    about = (
        f"Pass these to fsspec for {whose}, before the configured ones. Secrets are safer in @FILE or the environment."
    )
    return typer.Option(flag, metavar="JSON|@FILE", parser=read_storage_options, help=about)


Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The checkpoint's folder or URL; RUN@latest or RUN@500 for a step of a run.",
        show_default=False,
    ),
]
BackendName = Annotated[str | None, backend_option("--backend", "the backend")]
StorageOptions = Annotated[dict[str, Any] | None, storage_options_option("--storage-options", "the location")]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables; sizes in bytes.")]
Bar = Annotated[
    ShowBar,
    typer.Option(
        "--progress",
        help="Show a bar on stderr: on a terminal (auto), in a log too, as a line every 10 seconds (always), or never.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")]
