"""Checks of the settings that backends take, which all of them refuse in the same words."""

from __future__ import annotations

from hpdcp._base.errors import InvalidArgumentError


def at_least(option: str, value: float, least: float) -> None:
    """InvalidArgumentError if the setting is smaller than the least that works."""
    if value < least:
        raise InvalidArgumentError(f"{option} is {value}; expected at least {least}.")
