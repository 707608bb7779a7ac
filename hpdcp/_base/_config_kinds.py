"""Kinds of values that a key can have: what is expected of one, and what the text of it means."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from hpdcp._base.renames import warn_renamed

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i)?B|B)?", re.IGNORECASE)
SIZE_WITH_UNIT: Final = re.compile(r"\d+(?:\.\d+)?\s*(?:[KMGTP]i?)?B", re.IGNORECASE)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def parse_size(value: object) -> int:
    """Bytes meant by a whole number, or by text such as `"4096"`, `"512MiB"` or `"1.5 GB"`.

    >>> parse_size("512MiB"), parse_size("512MB")
    (536870912, 512000000)

    Raises:
        ValueError: it is neither, is negative, or is not a whole number of bytes.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError(value)
        number, prefix, binary = match.groups()
        power = "KMGTP".index(prefix.upper()) + 1 if prefix else 0
        value = Fraction(number) * (1024 if binary else 1000) ** power
    if isinstance(value, (float, Fraction)) and value % 1 == 0:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


@dataclass(frozen=True, slots=True)
class Kind:
    """What values a key has."""

    expected: str
    """In words, for messages and the reference."""
    read: Callable[[object], object]
    """The value meant; ValueError when it does not fit."""
    may_be_table: bool = False
    """Whether the value may be a table, which is read as a dict."""


def choice(*allowed: str) -> Kind:
    """One of these words."""

    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError(value)
        return str(value)

    return Kind("one of " + ", ".join(repr(name) for name in allowed), read)


def by_name(key: str, *allowed: str, renamed: Mapping[str, str]) -> Kind:
    """One of these words, or a table from patterns of names to such words.

    `renamed`: earlier words for some of them, which go on working, with a warning that names the `key`.
    """

    def read_word(value: object) -> str:
        if isinstance(value, str) and value in renamed:
            warn_renamed(f"{key} = {value!r}", f"{key} = {renamed[value]!r}")
            value = renamed[value]
        if value not in allowed:
            raise ValueError(value)
        return str(value)

    def read(value: object) -> str | dict[str, str]:
        if not isinstance(value, Mapping):
            return read_word(value)
        return {str(pattern): read_word(word) for pattern, word in value.items()}

    words = ", ".join(repr(name) for name in allowed)
    return Kind(f"one of {words}, or a table from patterns of names to these words", read, may_be_table=True)


def name() -> Kind:
    """The name of a backend or a layout."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise ValueError(value)
        return value

    return Kind("a name of letters, digits, '_', '-' and '.'", read)


def flag() -> Kind:
    """True or false."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

    def read(value: object) -> bool:
        if isinstance(value, str):
            value = words.get(value.strip().lower())
        if not isinstance(value, bool):
            raise ValueError(value)
        return value

    return Kind("true or false", read)


def seconds(*, zero: bool) -> Kind:
    """A duration."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(value)
        seconds = float(value)
        if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and not zero):
            raise ValueError(value)
        return seconds

    return Kind(f"a finite number of seconds, {'zero or more' if zero else 'more than zero'}", read)


def size_or_auto() -> Kind:
    """A number of bytes; None for "auto"."""

    def read(value: object) -> int | None:
        return None if value is None or value == "auto" else parse_size(value)

    return Kind("a number of bytes, as in 1048576 or '512MiB', or 'auto'", read)
