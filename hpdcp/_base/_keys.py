"""Keys: paths under a checkpoint's root, and which are refused."""

from __future__ import annotations

from typing import Final

from hpdcp._base.errors import InvalidArgumentError

TEMPORARY_PREFIX: Final = ".hpdcp-tmp-"
"""File names that start so are a backend's own while it writes: never a key, never listed."""


def checked_key(key: str) -> str:
    """`key`, if it names something under the root on every store; else InvalidArgumentError.

    Refused: an absolute path, an empty component, `.` and `..`, NUL, what is not UTF-8, and `TEMPORARY_PREFIX`.

    >>> checked_key("layers/0 [a].safetensors")
    'layers/0 [a].safetensors'
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        problem = "has an empty, '.' or '..' component"
    elif "\0" in key:
        problem = "holds a NUL"
    elif parts[-1].startswith(TEMPORARY_PREFIX):
        problem = f"starts with {TEMPORARY_PREFIX!r}, which marks files that are being written"
    elif not _is_utf8(key):
        problem = "holds a lone surrogate"
    else:
        return key
    raise InvalidArgumentError(f"key {key!r} {problem}: expected a relative path under the checkpoint's root.")


def can_be_key(name: str) -> bool:
    """Whether `checked_key` lets it pass: what else a store lists is not a key."""
    try:
        checked_key(name)
    except InvalidArgumentError:
        return False
    return True


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
