"""Whether torchrun started this command, on several processes at once, or somebody did by themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_RUN_ID: Final = "TORCHELASTIC_RUN_ID"
"""Only the agent of torchrun sets it, for the processes that it starts. `RANK` alone says nothing: pods of a training
job have it set for whoever looks into them."""


def rank() -> int:
    """Which of the processes that torchrun started to run this command this is; 0 without torchrun.

    A command that a rank of a training job starts inherits the rank's environment. It is nobody's rank: the other ranks
    do not run it, so what it leaves to rank 0 is done by nobody.
    """
    return int(os.environ["RANK"]) if _RUN_ID in os.environ and not _is_inherited() else 0


def _is_inherited() -> bool:
    """Whether whoever started this process is itself one that torchrun started; False where that cannot be seen."""
    try:
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return False
    return f"{_RUN_ID}={os.environ[_RUN_ID]}".encode() in environment.split(b"\0")
