"""Names of files that are being written, each with its writer: what a killed one leaves is known as such at once."""

from __future__ import annotations

import secrets

from hpdcp._base._keys import TEMPORARY_PREFIX
from hpdcp._base.processes import ProcessMark, has_ended


def temporary_name() -> str:
    """A new name for a file that this process is about to write."""
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{ProcessMark.current().token}"


def is_left_over(name: str) -> bool:
    """Whether it is a temporary file's name, and its writer is known to have ended.

    >>> is_left_over(temporary_name()), is_left_over("model.safetensors")
    (False, False)
    """
    return name.startswith(TEMPORARY_PREFIX) and has_ended(name.removeprefix(TEMPORARY_PREFIX).partition("-")[2])
