"""What each command does and prints: typer and rich, over the library. `hpdcp.cli` is the entry point.

Modules here import what needs torch in the command that uses it: it takes seconds, and a question about names, usage
or settings is answered without.
"""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from hpdcp.commands.config import show
from hpdcp.commands.convert import dcp_to_dcp, dcp_to_hf, dcp_to_torch, hf_to_dcp, torch_to_dcp
from hpdcp.commands.diff import diff
from hpdcp.commands.inspect import inspect
from hpdcp.commands.ls import hold, ls, release
from hpdcp.commands.prune import prune
from hpdcp.commands.rm import rm
from hpdcp.commands.verify import verify

_ABOUT = "Look into checkpoints of hpdcp, verify, compare, convert and remove them."

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=_ABOUT
)
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show the configuration in effect.")
convert_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Convert from and to Hugging Face weights and files of torch. Any two stores will do.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpdcp {installed_version('hpdcp')}")
        raise typer.Exit


@app.callback()
def hpdcp(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Look into checkpoints of hpdcp, verify, compare, convert and remove them."""


app.command()(inspect)
app.command()(verify)
app.command()(diff)
app.add_typer(convert_app, name="convert")
app.command()(rm)
app.command()(ls)
app.command()(prune)
app.command()(hold)
app.command()(release)
app.add_typer(config_app, name="config")
convert_app.command()(hf_to_dcp)
convert_app.command()(dcp_to_hf)
convert_app.command()(torch_to_dcp)
convert_app.command()(dcp_to_torch)
convert_app.command()(dcp_to_dcp)
config_app.command()(show)
