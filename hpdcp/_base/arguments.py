"""Arguments as their callers gave them: one of another type is refused at the door, by name.

Python takes any value where a condition is asked for, and `allow_pickle="false"` is true.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from hpdcp._base.errors import InvalidArgumentError


def require_flags(**flags: object) -> None:
    """Raise InvalidArgumentError, with its name, for one that is neither True nor False."""
    for name, value in flags.items():
        if value is not True and value is not False:
            raise InvalidArgumentError(f"{name} is {_shown(value)}; expected True or False.{_why_not_text(value)}")


def require_optional_flags(**flags: object) -> None:
    """As `require_flags`; None, which leaves the choice to the configuration, passes."""
    for name, value in flags.items():
        if value is not None and value is not True and value is not False:
            raise InvalidArgumentError(
                f"{name} is {_shown(value)}; expected True, False or None.{_why_not_text(value)}"
            )


def require_count(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless the value is a whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(f"{name} is {_shown(value)}; expected a whole number from 1.")


def require_text(**texts: object) -> None:
    """Raise InvalidArgumentError, with its name, for one that is neither None nor text."""
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise InvalidArgumentError(f"{name} is {_shown(value)}; expected a str.")


def require_mapping(**mappings: object) -> None:
    """Raise InvalidArgumentError, with its name, for one that is neither None nor a mapping."""
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            raise InvalidArgumentError(f"{name} is {_shown(value)}; expected a mapping, such as a dict.")


def require_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise InvalidArgumentError unless the value is None or one of the choices."""
    if value is not None and (not isinstance(value, str) or value not in choices):
        raise InvalidArgumentError(f"{name} is {_shown(value)}; expected one of {list(choices)}.")


def require_instance(name: str, value: object, kind: type, *, instead: str) -> None:
    """Raise InvalidArgumentError unless the value is None or a `kind`; `instead` says what serves in its place."""
    if value is None or isinstance(value, kind):
        return
    if isinstance(value, type):
        found = f"the class {value.__qualname__} itself; make one of it"
    else:
        found = f"a {type(value).__qualname__} of {type(value).__module__.partition('.')[0]}"
    raise InvalidArgumentError(f"{name} is {found}; expected a {kind.__name__} of hpdcp: {instead}.")


def _shown(value: object) -> str:
    """The value in a few words: of one that is no plain value, only the class, for its text may be anything."""
    if isinstance(value, (str, bytes, int, float)):
        return f"{value!r}"[:60]
    return f"a {type(value).__qualname__}"


def _why_not_text(value: object) -> str:
    return " Any text is true to Python, 'false' as well." if isinstance(value, str) else ""


WRITER: Final = "hpdcp.FileSystemWriter writes to paths and URLs"
READER: Final = "hpdcp.FileSystemReader reads from paths and URLs"
SAVE_PLANNER: Final = "hpdcp.StandardSavePlanner, or a class derived from it, plans saves"
LOAD_PLANNER: Final = "hpdcp.StandardLoadPlanner, or a class derived from it, plans loads"
