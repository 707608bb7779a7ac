"""What a comparison is told, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._manage._value_differences import ValueDifference

EntryKey: TypeAlias = tuple[str, int]
"""(name without the prefix, owner or -1)."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """What `compare_checkpoints` is told; it says what each means.

    Raises:
        InvalidArgumentError: a tolerance that is none; a pattern in place of a list of them.
    """

    values: bool
    rtol: float
    atol: float
    trust_checksums: bool
    layout: bool
    ignore_dtype: bool
    keys: Sequence[str]
    prefix_a: str
    prefix_b: str

    def __post_init__(self) -> None:
        if self.rtol < 0 or self.atol < 0 or not math.isfinite(self.rtol + self.atol):
            raise InvalidArgumentError(f"rtol is {self.rtol}, atol is {self.atol}; expected finite numbers from 0.")
        if isinstance(self.keys, str):
            raise InvalidArgumentError(f"keys is {self.keys!r}; expected a list of patterns, such as [{self.keys!r}].")

    @property
    def is_tolerant(self) -> bool:
        """Whether numbers may differ."""
        return self.rtol > 0 or self.atol > 0

    @property
    def across_dtypes(self) -> bool:
        """Whether values are compared also where dtypes differ."""
        return self.ignore_dtype or self.is_tolerant

    @property
    def with_values(self) -> bool:
        """Whether values are compared, since that is asked for or implied."""
        return self.values or self.trust_checksums or self.across_dtypes

    @property
    def uncounted(self) -> frozenset[Aspect]:
        """Aspects that are told of and do not count."""
        arrangement = frozenset() if self.layout else ARRANGEMENT
        return arrangement | ({Aspect.DTYPE} if self.ignore_dtype else frozenset())


class Aspect(Enum):
    """In what two names differ."""

    ONLY_IN_A = "only in A"
    ONLY_IN_B = "only in B"
    KIND = "kind"
    """A tensor and a Python value."""
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUES = "values"
    LAYOUT = "layout"
    """Stored in other boxes: saved under another parallel layout."""
    TIES = "ties"
    """Tied to another name on one side only, or to different ones; or on one side only, where both sides have a name
    that it is tied to."""
    NESTING = "nesting"
    """Other keys lead to it, as in `{"a.b": 1}` and `{"a": {"b": 1}}`."""


ARRANGEMENT: Final = frozenset({Aspect.LAYOUT, Aspect.TIES, Aspect.NESTING})
"""Differences in how things are stored, not in what."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which one name differs."""

    fqn: str
    """Without the prefix."""
    owner: int | None
    """The rank, for state under `PerRank`."""
    aspect: Aspect
    a: str
    """What it is on that side, for people; empty where there is nothing."""
    b: str
    elements: ValueDifference | None = None
    """For values of tensors."""

    @classmethod
    def of(cls, key: EntryKey, aspect: Aspect, a: str, b: str, elements: ValueDifference | None = None) -> Difference:
        """Of the entry with that key."""
        fqn, owner = key
        return cls(fqn, None if owner < 0 else owner, aspect, a, b, elements)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare_checkpoints` found."""

    url_a: str
    url_b: str
    names: int
    """Names that both have."""
    values: bool
    """Whether values were compared, not only what they are called and shaped like."""
    nbytes: int
    """Bytes of values read and compared, of each side."""
    trusted_nbytes: int
    """Bytes taken for equal, since all their recorded checksums are."""
    seconds: float
    differences: tuple[Difference, ...]
    """By name, numbers by their value."""
    arrangement: tuple[Difference, ...] = ()
    """Differences in how things are stored, where those were not asked for, and in dtypes that are to be ignored: they
    do not count."""
    across_dtypes: bool = False
    """Whether values were compared also where dtypes differ."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing that was compared differs."""
        return not self.differences
