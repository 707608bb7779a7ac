"""The setting `check_replicas`: how what several ranks hold is compared, name by name."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._base.config import ReplicaCheck

OFF: Final = 0
SAMPLE: Final = 1
ALL: Final = 2
_CODES: Final[Mapping[str, int]] = {"off": OFF, "sample": SAMPLE, "all": ALL}


class ReplicaRules:
    """What `check_replicas` says of each name.

    Args:
        setting: one word for all names, or a word for each pattern. Of patterns that match a name the last one counts;
            a name that none matches is sampled.
    """

    def __init__(self, setting: ReplicaCheck | Mapping[str, ReplicaCheck]) -> None:
        self._setting = setting
        self._default = _CODES[setting] if isinstance(setting, str) else SAMPLE
        patterns = {} if isinstance(setting, str) else setting
        self._patterns = [(re.compile(fnmatch.translate(name)), _CODES[how]) for name, how in patterns.items()]

    @property
    def is_off(self) -> bool:
        """Whether nothing is compared, and replicas are taken to be equal."""
        return not self._patterns and self._default == OFF

    def modes(self, fqns: Iterable[str]) -> npt.NDArray[np.uint8]:
        """`OFF`, `SAMPLE` or `ALL` for each name."""
        if not self._patterns:
            return np.full(sum(1 for _ in fqns), self._default, dtype=np.uint8)
        return np.array([self._mode(fqn) for fqn in fqns], dtype=np.uint8)

    def exempt(self, fqns: Iterable[str]) -> npt.NDArray[np.bool_] | None:
        """Names that may differ from rank to rank, since a pattern says "off": the lowest rank's is stored. None: none.

        The word "off" for all names exempts none: it says that replicas are equal, and any may be stored.
        """
        if OFF not in {code for _, code in self._patterns}:
            return None
        found: npt.NDArray[np.bool_] = self.modes(fqns) == OFF
        return found if found.any() else None

    def key(self) -> Hashable:
        """Equal for two rules that say the same of every name, of immutable plain types."""
        return self._setting if isinstance(self._setting, str) else tuple(self._setting.items())

    def __str__(self) -> str:
        return json.dumps(self._setting if isinstance(self._setting, str) else dict(self._setting))

    def _mode(self, fqn: str) -> int:
        return next((code for pattern, code in reversed(self._patterns) if pattern.match(fqn)), self._default)
