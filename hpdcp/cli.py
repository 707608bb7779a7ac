"""The command `hpdcp`. What it does is in `hpdcp.commands`, which needs the packages of the extra `cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from hpdcp.errors import HpdcpError, InvalidArgumentError

_NEEDED = ("rich", "typer")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (`sys.argv`, unless `arguments` are given) and exit.

    Status 0: done, and sound. 1: the checkpoint is damaged, not there, or cannot be read. 2: wrong usage. An error of
    hpdcp is one line on stderr.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(f'hpdcp: the command line needs {" and ".join(missing)}: pip install "hpdcp[cli]"\n')
        raise SystemExit(2)
    from hpdcp.commands import app  # only now: it cannot be imported without them

    try:
        app(args=None if arguments is None else list(arguments), prog_name="hpdcp")
    except HpdcpError as error:
        sys.stderr.write(f"hpdcp: {' '.join(str(error).split())}\n")
        raise SystemExit(2 if isinstance(error, InvalidArgumentError) else 1) from None
