"""Earlier names that still work: whoever uses one is told the new name, once."""

from __future__ import annotations

import warnings

_told: set[str] = set()


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn, once in this process, that `old` is an earlier name of `new` and goes on working.

    A FutureWarning, which is shown by default: a DeprecationWarning about a file of settings would reach nobody.
    `stacklevel` is 3 where a function of hpdcp calls this for its own caller.
    """
    if old not in _told:
        _told.add(old)
        text = f"{old} is an earlier name of {new}. It still works; use {new}."
        warnings.warn(text, FutureWarning, stacklevel=stacklevel)
