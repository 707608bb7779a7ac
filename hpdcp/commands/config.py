"""`hpdcp config show`: every key of the configuration."""

from __future__ import annotations

from hpdcp._base import config
from hpdcp._files import registry
from hpdcp.commands import output
from hpdcp.commands.options import AsJson
from hpdcp.commands.output import leave_to_rank_0, print_json, table_of, text_of


def show(as_json: AsJson = False) -> None:
    """Show every key, its value and where that comes from. Secrets are masked."""
    leave_to_rank_0()
    settings = config.effective()
    registry.check_configuration()
    if as_json:
        print_json([{"key": s.key, "value": s.public, "origin": s.origin} for s in settings])
        return
    table = table_of("key", "value", "from")
    for setting in settings:
        table.add_row(text_of(setting.key), text_of(setting.shown), text_of(setting.origin))
    output.show(table)
