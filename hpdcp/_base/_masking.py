"""Values of settings as they may be shown: text under a name that is not known to be harmless is masked."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpdcp._base._secrets import may_be_shown, scrubbed


def masked(key: str, value: object) -> str:
    """The value of that key as text."""
    return _text(cleaned(key, value))


def cleaned(key: str, value: object) -> object:
    """The value of that key without what looks like a secret."""
    if isinstance(value, Mapping):
        return {str(name): cleaned(str(name), entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(key, entry) for entry in value]
    if not may_be_shown(key, value):
        return "***"
    return scrubbed(value) if isinstance(value, str) else value


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_text(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)


def as_json(value: object) -> object:
    """The value in what JSON has; as text where it has nothing for it."""
    if isinstance(value, Mapping):
        return {name: as_json(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [as_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)
