"""The folders of a run: which name each step has, and which folders are steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hpdcp._base.backend import can_be_key
from hpdcp._base.errors import InvalidArgumentError

DEFAULT_NAME: Final = "step_{step:08d}"
_FIELD: Final = re.compile(r"\{step(:0?\d*d)?\}")
_LAST_NUMBER: Final = re.compile(r"^(.*?)([0-9]+)([^0-9]*)$", re.DOTALL)
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

    @classmethod
    def of(cls, pattern: str | None, folders: Iterable[str]) -> StepNames:
        """By the pattern; without one, as folders with numbers are called there, most of them the same.

        >>> StepNames.of(None, ["logs", "it-5.ckpt", "it-10.ckpt", "v2"]).pattern
        'it-{step}.ckpt'
        >>> StepNames.of(None, ["it-5", "step_5"]).pattern == StepNames.of(None, []).pattern == DEFAULT_NAME
        True
        """
        if pattern is not None:
            return cls(pattern)
        usual = cls()
        names = list(folders)
        if usual.steps(names):
            return usual
        shapes = Counter(_LAST_NUMBER.sub(r"\1{step}\3", name) for name in names if not {"{", "}"} & set(name))
        found = [(count, shape) for shape, count in shapes.items() if "{step}" in shape]
        return cls(max(found)[1]) if found else usual

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
