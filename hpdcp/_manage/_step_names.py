"""The folders of a run: which name each step has, and which folders are steps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hpdcp._base.backend import can_be_key
from hpdcp._base.errors import InvalidArgumentError

DEFAULT_NAME: Final = "step_{step:08d}"
_FIELD: Final = re.compile(r"\{step(:0?\d*d)?\}")
_MOST_DIGITS: Final = 18
"""As many as an int64 holds."""


@dataclass(frozen=True, slots=True)
class StepNames:
    """How a run's folders are called.

    >>> names = StepNames("step_{step:08d}")
    >>> names.folder(500), names.step("step_00000500"), names.step("step_500"), names.step("step_5x")
    ('step_00000500', 500, 500, None)
    """

    pattern: str = DEFAULT_NAME

    def __post_init__(self) -> None:
        plain = _FIELD.sub("", self.pattern)
        if len(_FIELD.findall(self.pattern)) != 1 or {"{", "}", "/"} & set(plain) or not can_be_key(self.folder(0)):
            raise InvalidArgumentError(
                f"name is {self.pattern!r}; expected the name of one folder with {{step}} in it once, such as "
                f"{DEFAULT_NAME!r} or 'step_{{step}}'."
            )

    def folder(self, step: int) -> str:
        """The folder of a step that is saved now."""
        return self.pattern.format(step=step)

    def step(self, folder: str) -> int | None:
        """The step whose folder this is, with zeros in front or without; None for any other folder."""
        before, after = _FIELD.sub("{}", self.pattern).split("{}")
        if not folder.startswith(before) or not folder.endswith(after):
            return None
        digits = folder[len(before) : len(folder) - len(after)]
        return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS else None

    def steps(self, folders: Iterable[str]) -> dict[int, str]:
        """Step → its folder, ascending; of two for one step that which is called as it would be now.

        >>> StepNames().steps(["step_10", "step_00000009", "step_00000010", "other"])
        {9: 'step_00000009', 10: 'step_00000010'}
        """
        found: dict[int, str] = {}
        for folder in folders:
            step = self.step(folder)
            if step is not None and (step not in found or folder == self.folder(step)):
                found[step] = folder
        return dict(sorted(found.items()))
