"""Boxes in a tensor's global coordinates, by integers only: no torch, no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open box: `offsets[d] <= x[d] < offsets[d] + sizes[d]`; `Box((), ())` is a 0-dim tensor's one cell."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of everything in a tensor of `shape`.

        >>> Box.whole((2, 3))
        Box(offsets=(0, 0), sizes=(2, 3))
        """
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.sizes)

    @property
    def volume(self) -> int:
        """How many cells it holds; 1 without dimensions.

        >>> Box((4, 0), (2, 3)).volume, Box((), ()).volume, Box((4,), (0,)).volume
        (6, 1, 0)
        """
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no cell."""
        return 0 in self.sizes

    @property
    def stops(self) -> tuple[int, ...]:
        """The first coordinate past it, per dimension.

        >>> Box((4, 0), (2, 3)).stops
        (6, 3)
        """
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def intersect(want: Box, have: Box) -> Box | None:
    """The box both cover, in global coordinates; None where they do not meet (an empty box meets nothing).

    >>> intersect(Box((0, 0), (4, 4)), Box((2, 3), (4, 4)))
    Box(offsets=(2, 3), sizes=(2, 1))
    >>> intersect(Box((0,), (4,)), Box((4,), (4,))) is None
    True
    >>> intersect(Box((), ()), Box((), ()))
    Box(offsets=(), sizes=())
    """
    offsets: list[int] = []
    sizes: list[int] = []
    for a, an, b, bn in zip(want.offsets, want.sizes, have.offsets, have.sizes, strict=True):
        start = max(a, b)
        size = min(a + an, b + bn) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def relative(inner: Box, outer: Box) -> Box:
    """`inner` in the coordinates of `outer`, whose first cell is the origin there.

    >>> relative(Box((4, 5), (1, 2)), Box((4, 2), (3, 8)))
    Box(offsets=(0, 3), sizes=(1, 2))
    """
    return Box(tuple(a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def flat_start(inner: Box, shape: Sequence[int]) -> int:
    """The position of `inner`'s first cell in a row-major array of `shape`, in elements.

    >>> flat_start(Box((1, 2, 0), (1, 1, 4)), (2, 3, 4))
    20
    """
    position = 0
    for offset, size in zip(inner.offsets, shape, strict=True):
        position = position * size + offset
    return position


def _unbroken_from(inner: Box, shape: Sequence[int]) -> int:
    """The first dimension from which on `inner` is one run for every index before it."""
    dim = inner.ndim
    while dim > 0 and inner.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    return max(dim - 1, 0)


def is_contiguous(inner: Box, shape: Sequence[int]) -> bool:
    """Whether `inner` is one unbroken run of a row-major array of `shape`; an empty box always is.

    >>> is_contiguous(Box((1, 0), (2, 4)), (3, 4)), is_contiguous(Box((0, 1), (2, 2)), (3, 4))
    (True, False)
    >>> is_contiguous(Box((2, 1), (1, 2)), (3, 4))
    True
    """
    return inner.is_empty or all(size == 1 for size in inner.sizes[: _unbroken_from(inner, shape)])


def row_runs(inner: Box, shape: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """The longest unbroken runs that make up `inner` in a row-major array of `shape`, in elements.

    Returns the runs' starts, ascending, and their length, which all runs of a box share. The runs in order are the
    cells of `inner` in its own row-major order.

    >>> row_runs(Box((1, 1), (2, 2)), (3, 4))
    (array([5, 9]), 2)
    >>> row_runs(Box((1, 0), (2, 4)), (3, 4))
    (array([4]), 8)
    """
    if inner.is_empty:
        return np.empty(0, np.int64), 0
    first = _unbroken_from(inner, shape)
    starts = np.zeros(1, np.int64)
    for dim in range(first):
        along = np.arange(inner.offsets[dim], inner.offsets[dim] + inner.sizes[dim], dtype=np.int64)
        starts = (starts[:, None] * shape[dim] + along).reshape(-1)
    tail = Box((0,) * first + inner.offsets[first:], inner.sizes)
    return starts * math.prod(shape[first:]) + flat_start(tail, shape), math.prod(inner.sizes[first:])
