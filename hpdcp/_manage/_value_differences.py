"""How far the elements of two tensors are apart, found part by part: what `hpdcp.compare` reports of values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hpdcp._convert.tensor_streams import TensorStream, aligned

_NUMBERS_AT_ONCE: Final = 1 << 17
"""Elements that are looked at as numbers at a time: in float64 a MiB, which caches hold."""
_WHOLE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element."""


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
    """Largest |a - b| / |b| of those that is finite, so b = 0 is left aside; None where none is."""
    one_nan: int
    """Elements that are NaN on one side only."""


class Flow:
    """A stream's elements, in whatever amounts somebody wants them."""

    def __init__(self, parts: TensorStream) -> None:
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
        differ = _differing_bits(a, b) if a.dtype == b.dtype else _differing_numbers(a, b)
        if not differ.any():
            return
        x, y = _numbers(a), _numbers(b)
        apart = None if x is None or y is None else (x - y).abs()
        if y is not None and apart is not None and x is not None:
            if (self._rtol or self._atol) and _is_inexact(a.dtype, b.dtype):
                differ &= ~self._near(x, y, apart)
                if not differ.any():
                    return
            self._measure(x, y, apart.masked_fill_(~differ, 0.0), differ)
        count = int(differ.sum())
        self._differing += count
        if count and self._first is None:
            self._first = position + int(differ.to(torch.uint8).argmax())

    def _near(self, x: torch.Tensor, y: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
        """Where the tolerance lets numbers pass; infinities only where they are the same, NaN where both are."""
        near = apart <= y.abs().mul_(self._rtol).add_(self._atol)
        if not math.isfinite(float(apart.sum())):
            odd = ~apart.isfinite()
            near = torch.where(odd, (x == y) | (x.isnan() & y.isnan()), near)
        return near

    def _measure(self, x: torch.Tensor, y: torch.Tensor, apart: torch.Tensor, differ: torch.Tensor) -> None:
        """`apart` is |x - y| where they `differ`, else 0."""
        if math.isnan(float(apart.sum())):
            self._one_nan += int((x.isnan() ^ y.isnan()).sum())
            unknown = apart.isnan()  # inf - inf is, as well, but those do not differ
            differ = differ & ~unknown
            apart.masked_fill_(unknown, 0.0)
        largest = float(apart.max())
        if largest > 0 or bool(differ.any()):
            self._max_abs = max(self._max_abs or 0.0, largest)
        relative = apart.div_(y.abs()).nan_to_num_(0.0, 0.0, 0.0)
        largest = float(relative.max())
        if largest > 0:
            self._max_rel = max(self._max_rel or 0.0, largest)

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


def _differing_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements differ in a bit."""
    whole = _WHOLE.get(a.element_size())
    if whole is None:
        x, y = (aligned(side).view(torch.int64).view(side.numel(), -1) for side in (a, b))
        return (x != y).any(dim=1)
    return aligned(a).view(whole) != aligned(b).view(whole)


def _differing_numbers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements of two dtypes are not the same number; NaN is like any NaN."""
    if not _is_inexact(a.dtype) and not _is_inexact(b.dtype):
        # float64 would round those from 2**53 on. As int64, those of uint64 from 2**63 on are negative.
        p, q = (aligned(side).to(torch.int64) for side in (a, b))
        return (p != q) | ((p < 0) & ((a.dtype == torch.uint64) != (b.dtype == torch.uint64)))
    x, y = _numbers(a), _numbers(b)
    if x is None or y is None:
        return torch.ones(a.numel(), dtype=torch.bool)
    return (x != y) & ~(x.isnan() & y.isnan())


def _numbers(part: torch.Tensor) -> torch.Tensor | None:
    """The elements as float64 or complex128; None where torch cannot say what numbers they are."""
    try:
        return aligned(part).to(torch.complex128 if part.dtype.is_complex else torch.float64)
    except (RuntimeError, TypeError):
        return None


def _is_inexact(*dtypes: torch.dtype) -> bool:
    return any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
