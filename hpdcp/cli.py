"""The command `hpdcp`. What it does is in `hpdcp.commands`, which needs the packages of the extra `cli`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from hpdcp._base.errors import HpdcpError, InvalidArgumentError

_NEEDED = ("rich", "tqdm", "typer")
_LOOKING = frozenset({"inspect", "verify", "ls", "config"})
"""Commands that answer one question about one checkpoint: one that cannot be read is an answer."""
_INTERRUPTED = 130
"""As shells have it: 128 and the number of SIGINT."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (`sys.argv`, unless `arguments` are given) and exit.

    Status 0: done; sound; equal. 1: damaged; different; not confirmed; for `inspect`, `verify` and `ls` also: there is
    no whole checkpoint, or it cannot be read. 2: wrong usage, or a wrong configuration. 3: for all other commands, an
    error of a checkpoint or a store. 130: interrupted. An error of hpdcp is one line on stderr, under torchrun one for
    each host.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(f'hpdcp: the command line needs {" and ".join(missing)}: pip install "hpdcp[cli]"\n')
        raise SystemExit(2)
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        from hpdcp.commands import app  # only now: it cannot be imported without them

        app(args=given, prog_name="hpdcp")
    except KeyboardInterrupt:
        # Importing torch takes seconds, in which people change their minds; in a command, typer says the same.
        raise SystemExit(_INTERRUPTED) from None
    except HpdcpError as error:
        from hpdcp.commands.launched import rank
        from hpdcp.commands.wording import in_commands

        # All ranks raise what one of them met. On each host one of them says so.
        if not rank() or os.environ["LOCAL_RANK"] == "0":
            sys.stderr.write(f"hpdcp: {in_commands(' '.join(str(error).split()))}\n")
        raise SystemExit(_status(error, given)) from None


def _status(error: HpdcpError, given: Sequence[str]) -> int:
    if isinstance(error, InvalidArgumentError):
        return 2
    command = next((argument for argument in given if not argument.startswith("-")), "")
    return 1 if command in _LOOKING else 3
