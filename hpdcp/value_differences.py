"""How far the elements of two tensors are apart, found part by part: what `hpdcp.compare` reports of values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hpdcp.conversion import Parts

_NUMBERS_AT_ONCE: Final = 1 << 20
"""Elements that are looked at as numbers at a time: in float64, and with what is computed of them, about 50 MiB."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How far the elements of two tensors are apart."""

    differing: int
    """Elements that differ: in a bit, or by more than the tolerance."""
    elements: int
    first: tuple[int, ...]
    """Index of the first that does."""
    max_abs: float | None
    """Largest |a - b| of those that differ, NaN left aside; 0 where only bits do (0.0 and -0.0); None where no two of
    them can be subtracted."""
    max_rel: float | None
    """Largest |a - b| / |b| of those, b = 0 left aside."""
    one_nan: int
    """Elements that are NaN on one side only."""


class Flow:
    """A stream's elements, in whatever amounts somebody wants them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._left: torch.Tensor | None = None

    def ready(self) -> int:
        """How many elements can be taken; at least one."""
        while self._left is None or not self._left.numel():
            self._left = None  # before the next block is made, so that its memory is free
            self._left = next(self._parts)[1].view(-1)
        return self._left.numel()

    def take(self, count: int) -> torch.Tensor:
        assert self._left is not None
        taken, self._left = self._left[:count], self._left[count:]
        return taken


class Tally:
    """What is found about one tensor, part by part."""

    def __init__(self, shape: tuple[int, ...], rtol: float, atol: float) -> None:
        self._shape = shape
        self._rtol = rtol
        self._atol = atol
        self._differing = 0
        self._one_nan = 0
        self._first: int | None = None
        self._max_abs: float | None = None
        self._max_rel: float | None = None

    def compare(self, position: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Flat elements that begin at `position`."""
        if a.dtype == b.dtype and _same_bytes(a, b):
            return
        for start in range(0, a.numel(), _NUMBERS_AT_ONCE):
            self._compare_few(position + start, *(side[start : start + _NUMBERS_AT_ONCE] for side in (a, b)))

    def _compare_few(self, position: int, a: torch.Tensor, b: torch.Tensor) -> None:
        differ = torch.ones(a.numel(), dtype=torch.bool)
        if a.dtype == b.dtype:
            differ = (_elements(a) != _elements(b)).any(dim=1)
        where = differ.nonzero().view(-1)
        numbers = _numbers(a, where), _numbers(b, where)
        x, y = numbers
        if x is not None and y is not None and (self._rtol or self._atol) and _is_inexact(a.dtype, b.dtype):
            far = ~torch.isclose(x, y, rtol=self._rtol, atol=self._atol, equal_nan=True)
            where, x, y = where[far], x[far], y[far]
        if not len(where):
            return
        if self._first is None:
            self._first = position + int(where[0])
        self._differing += len(where)
        if x is not None and y is not None:
            self._measure(x, y)

    def _measure(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._one_nan += int((x.isnan() ^ y.isnan()).sum())
        apart = (x - y).abs()
        apart = torch.where(x == y, torch.zeros_like(apart), apart)  # inf - inf is NaN
        known = ~apart.isnan()
        apart, size = apart[known], y.abs()[known]
        if len(apart):
            self._max_abs = max(self._max_abs or 0.0, float(apart.max()))
        relative = (apart / size)[size > 0]
        relative = relative[~relative.isnan()]
        if len(relative):
            self._max_rel = max(self._max_rel or 0.0, float(relative.max()))

    def result(self) -> ValueDifference | None:
        """None where nothing differs."""
        if self._first is None:
            return None
        first = tuple(int(index) for index in np.unravel_index(self._first, self._shape))
        return ValueDifference(
            self._differing, math.prod(self._shape), first, self._max_abs, self._max_rel, self._one_nan
        )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    x, y = a.view(torch.uint8), b.view(torch.uint8)
    whole = x.numel() // 8 * 8
    if whole and x.data_ptr() % 8 == 0 and y.data_ptr() % 8 == 0:
        # Eight bytes at a time: torch compares element by element.
        if not torch.equal(x[:whole].view(torch.int64), y[:whole].view(torch.int64)):
            return False
        x, y = x[whole:], y[whole:]
    return torch.equal(x, y)


def _elements(part: torch.Tensor) -> torch.Tensor:
    """A row of bytes for each element."""
    return part.view(torch.uint8).view(-1, part.element_size())


def _numbers(part: torch.Tensor, where: torch.Tensor) -> torch.Tensor | None:
    """The elements at `where` as float64 or complex128; None where torch cannot say what numbers they are."""
    try:
        # By their bytes: not every dtype can be indexed, and files of other writers align nothing.
        chosen = _elements(part)[where].contiguous().view(-1).view(part.dtype)
        return chosen.to(torch.complex128 if part.dtype.is_complex else torch.float64)
    except (RuntimeError, TypeError):
        return None


def _is_inexact(*dtypes: torch.dtype) -> bool:
    return any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
