"""The order in which people sort names with numbers in them."""

from __future__ import annotations

import re
from typing import Final

_NUMBER: Final = re.compile("([0-9]{1,18})")
"""As many digits as an int64 holds: names come from files that a stranger may have written, and int() of a million
digits takes seconds."""


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Sorts names as people count: layer 2 before layer 10.

    >>> sorted(["h.10.w", "h.9.w", "h.w"], key=natural_key)
    ['h.9.w', 'h.10.w', 'h.w']
    """
    # With the group, re.split keeps the numbers: they are at the odd positions.
    parts = enumerate(_NUMBER.split(name))
    return [(position % 2 == 0, int(part) if position % 2 else 0, part) for position, part in parts if part]
