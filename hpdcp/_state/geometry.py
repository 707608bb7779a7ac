"""Boxes in a tensor's global coordinates, by integers only: no torch, no I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpdcp._base.errors import InvalidArgumentError

Runs = tuple[tuple[int, int], ...]
"""Ascending, separate stretches of one axis, each as (start, length); lengths are positive."""


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


def shift(box: Box, by: Sequence[int]) -> Box:
    """`box` moved by `by`.

    >>> shift(Box((1, 2), (3, 3)), (10, 20))
    Box(offsets=(11, 22), sizes=(3, 3))
    """
    return Box(tuple(offset + step for offset, step in zip(box.offsets, by, strict=True)), box.sizes)


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


def index_runs(indices: ArrayLike) -> list[tuple[int, int]]:
    """The stretches of consecutive ascending numbers in `indices`, in order, as (start, length).

    >>> index_runs([0, 1, 4, 5, 6, 2])
    [(0, 2), (4, 3), (2, 1)]
    """
    found = np.asarray(indices, np.int64)
    if not found.size:
        return []
    begins = np.concatenate(([0], np.flatnonzero(np.diff(found) != 1) + 1))
    lengths = np.diff(begins, append=found.size)
    return list(zip(found[begins].tolist(), lengths.tolist(), strict=True))


def boxes_from_runs(runs: Sequence[Sequence[tuple[int, int]]]) -> list[Box]:
    """The boxes that hold every combination of one run per dimension, last dimension fastest.

    >>> boxes_from_runs([[(0, 2), (4, 1)], [(3, 5)]])
    [Box(offsets=(0, 3), sizes=(2, 5)), Box(offsets=(4, 3), sizes=(1, 5))]
    >>> boxes_from_runs([])
    [Box(offsets=(), sizes=())]
    """
    return [Box(tuple(s for s, _ in pick), tuple(n for _, n in pick)) for pick in itertools.product(*runs)]


def split_flat_interval(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Elements `[start, stop)` of a row-major array of `shape` as boxes, each with the position of its first element.

    The boxes come in order and are runs of the array; there are at most 2k-1 of them for k dimensions (k >= 1): the
    rest of a row, whole rows, the beginning of a row, at each level. Raises `InvalidArgumentError` for an interval that
    leaves the array.

    >>> for box, at in split_flat_interval((3, 4), 2, 9): print(at, box.offsets, box.sizes)
    2 (0, 2) (1, 2)
    4 (1, 0) (1, 4)
    8 (2, 0) (1, 1)
    >>> split_flat_interval((), 0, 1)
    [(Box(offsets=(), sizes=()), 0)]
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise InvalidArgumentError(
            f"Elements [{start}, {stop}) are not inside an array of shape {tuple(shape)}, "
            f"which has {math.prod(shape)} elements."
        )
    boxes: list[tuple[Box, int]] = []
    _split_below(tuple(shape), (), start, stop, 0, boxes)
    return boxes


def _split_below(
    shape: tuple[int, ...], prefix: tuple[int, ...], start: int, stop: int, base: int, out: list[tuple[Box, int]]
) -> None:
    """Append the boxes of `[start, stop)` of the sub-array at index `prefix`, which begins at element `base`."""
    if start >= stop:
        return
    ones = (1,) * len(prefix)
    if not shape:
        out.append((Box(prefix, ones), base))
        return
    row, rest = math.prod(shape[1:]), shape[1:]

    def part_of_row(index: int, begin: int, end: int) -> None:
        _split_below(rest, (*prefix, index), begin - index * row, end - index * row, base + index * row, out)

    first, last = start // row, stop // row
    if start % row:
        part_of_row(first, start, min(stop, (first + 1) * row))
        first += 1
    if first < last:
        box = Box((*prefix, first, *(0 for _ in rest)), (*ones, last - first, *rest))
        out.append((box, base + first * row))
    if stop % row and first <= last:
        part_of_row(last, last * row, stop)


@dataclass(frozen=True, slots=True)
class Split:
    """One division of an axis among the ranks of a mesh dimension."""

    dim: int
    parts: int
    """Among how many ranks."""
    index: int
    """Which of them is meant."""
    pieces: int = 1
    """The axis is cut into so many pieces first and each piece is divided; more than 1 leaves rows apart."""


def owned_runs(shape: Sequence[int], splits: Sequence[Split]) -> tuple[Runs, ...]:
    """What is left of each dimension of `shape` after `splits`, one after the other, each dividing what is left.

    A division into n gives everyone `ceil(size / n)` in order until nothing is left, so the last ones may get less or
    nothing. Runs that touch are joined.

    >>> owned_runs((6, 3), [Split(dim=0, parts=4, index=2)])
    (((4, 2),), ((0, 3),))
    >>> owned_runs((8,), [Split(dim=0, parts=2, index=0, pieces=2)])
    (((0, 2), (4, 2)),)
    >>> owned_runs((6,), [Split(dim=0, parts=4, index=3)])
    ((),)
    """
    owned: list[Runs] = [((0, size),) if size else () for size in shape]
    for split in splits:
        owned[split.dim] = _divide(owned[split.dim], split)
    return tuple(owned)


def _divide(runs: Runs, split: Split) -> Runs:
    total = sum(length for _, length in runs)
    piece = -(-total // split.pieces)
    kept: list[tuple[int, int]] = []
    for begin in range(0, total, piece or 1):
        size = min(piece, total - begin)
        share = -(-size // split.parts)
        start = begin + min(size, split.index * share)
        stop = begin + min(size, (split.index + 1) * share)
        _append_positions(kept, runs, start, stop)
    return tuple(kept)


def _append_positions(kept: list[tuple[int, int]], runs: Runs, start: int, stop: int) -> None:
    """Append what lies at positions `[start, stop)` of the cells of `runs`, counted over all runs."""
    passed = 0
    for run, length in runs:
        a, b = max(start - passed, 0), min(stop - passed, length)
        passed += length
        if a >= b:
            continue
        if kept and sum(kept[-1]) == run + a:
            kept[-1] = (kept[-1][0], kept[-1][1] + b - a)
        else:
            kept.append((run + a, b - a))


def missing(want: Box, have: Sequence[Box]) -> Box | None:
    """A box inside `want` that none of `have` covers, or None where they cover all of it.

    Right for boxes that overlap one another as well; of several holes the one found first going from low to high
    coordinates is returned, whole where its neighbours' edges do not cut it.

    >>> missing(Box((0, 0), (4, 4)), [Box((0, 0), (2, 4)), Box((2, 0), (2, 3))])
    Box(offsets=(2, 3), sizes=(2, 1))
    >>> missing(Box((0,), (4,)), [Box((0,), (3,)), Box((2,), (9,))]) is None
    True
    """
    if want.is_empty:
        return None
    clipped = [met for box in have if (met := intersect(want, box)) is not None]
    if want in clipped:
        return None
    # Disjoint boxes inside `want` that have its volume leave nothing out: the usual load needs no search.
    fills = len(clipped) <= _PAIRWISE and sum(box.volume for box in clipped) == want.volume
    if fills and all(intersect(a, b) is None for a, b in itertools.combinations(clipped, 2)):
        return None
    starts = np.array([box.offsets for box in clipped], np.int64).reshape(len(clipped), want.ndim)
    stops = np.array([box.stops for box in clipped], np.int64).reshape(len(clipped), want.ndim)
    if len(clipped) > _PAIRWISE and _covers_grid(want, starts, stops):
        return None
    return _first_hole(want, starts, stops)


_PAIRWISE = 8
"""Up to so many boxes are compared pair by pair; beyond, the grid is quicker."""


def _covers_grid(want: Box, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> bool:
    """Whether boxes inside `want` cover it, counted on the grid of their edges; False too for a grid too fine to count.

    Shards of a mesh have a grid with about as many cells as there are shards: 1024 of them take 0.3 ms this way, and 40
    by the search.
    """
    bounds = np.concatenate((starts, stops, [want.offsets, want.stops]))
    edges = [np.unique(bounds[:, dim]) for dim in range(want.ndim)]
    # A dimension without an edge inside is covered by every box alike.
    varying = [dim for dim, edge in enumerate(edges) if len(edge) > 2]
    if math.prod(len(edges[dim]) for dim in varying) > 16 * len(starts) + 4096:
        return False
    counts = np.zeros([len(edges[dim]) for dim in varying], np.int64)
    # +1 where a box begins and -1 where it ends, along every dimension; summed up again that is boxes per cell.
    for corner in itertools.product((starts, stops), repeat=len(varying)):
        at = [np.searchsorted(edges[dim], side[:, dim]) for dim, side in zip(varying, corner, strict=True)]
        np.add.at(counts, tuple(at), (-1) ** sum(side is stops for side in corner))
    for axis in range(counts.ndim):
        counts = counts.cumsum(axis=axis)
    return bool((counts[(slice(-1),) * counts.ndim] > 0).all())


def _first_hole(want: Box, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Box | None:
    pending = [(np.array(want.offsets, np.int64), np.array(want.stops, np.int64), starts, stops)]
    while pending:
        low, high, starts, stops = pending.pop()
        if not len(starts):
            return Box(tuple(low.tolist()), tuple((high - low).tolist()))
        if ((starts <= low) & (stops >= high)).all(axis=1).any():
            continue
        dim, at = _cut(low, high, starts, stops)
        middle_high, middle_low = high.copy(), low.copy()
        middle_high[dim] = middle_low[dim] = at
        below, above = starts[:, dim] < at, stops[:, dim] > at
        pending.append((middle_low, high, starts[above], stops[above]))
        pending.append((low, middle_high, starts[below], stops[below]))
    return None


def _cut(
    low: NDArray[np.int64], high: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[int, int]:
    """The dimension with the most box edges inside the region, and the middle one of them."""
    edges = np.concatenate((starts, stops))
    inside = (edges > low) & (edges < high)
    dim = int(inside.sum(axis=0).argmax())
    found = np.sort(edges[inside[:, dim], dim])
    return dim, int(found[len(found) // 2])


class BoxIndex:
    """Finds which of many boxes meet a given one, in steps that follow the number found, not the number held.

    Boxes close to one another are grouped by sixteen, the groups again, and so on; a query opens only groups whose
    bounds it meets. "Close" counts ranks along every dimension on which the boxes differ, so it makes no difference
    whether shards vary on one dimension, another, or several (ordering by one dimension makes every saved chunk a
    candidate when the shards vary on another).
    """

    __slots__ = ("_bounds", "_ndim", "_rows")

    _FAN = 16

    def __init__(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Index the boxes of rows of two (n, d) arrays. Raises `InvalidArgumentError` for other shapes."""
        if offsets.ndim != 2 or offsets.shape != sizes.shape:
            raise InvalidArgumentError(
                f"Offsets and sizes must be two arrays of one shape (boxes, dimensions); found {offsets.shape} and "
                f"{sizes.shape}."
            )
        self._ndim = offsets.shape[1]
        filled = np.flatnonzero((sizes > 0).all(axis=1))
        low = offsets[filled].astype(np.int64, copy=False)
        order = _neighbours_together(low) if len(filled) > self._FAN else np.arange(len(filled))
        self._rows = filled[order]
        low = low[order]
        high = low + sizes[self._rows]
        self._bounds = [(low, high)]
        while len(low) > self._FAN:
            begins = np.arange(0, len(low), self._FAN)
            low, high = np.minimum.reduceat(low, begins, axis=0), np.maximum.reduceat(high, begins, axis=0)
            self._bounds.append((low, high))

    def overlapping(self, box: Box) -> NDArray[np.int64]:
        """The numbers of the rows whose box shares a cell with `box`, ascending; empty boxes share none."""
        tested = self._tested(box)
        low, high = self._bounds[0]
        return np.sort(self._rows[tested[self._meets(box, low[tested], high[tested])]])

    def _tested(self, box: Box) -> NDArray[np.int64]:
        """Positions (in the index's own order) that a query compares one by one."""
        if box.ndim != self._ndim:
            raise InvalidArgumentError(f"A box of {box.ndim} dimensions was looked up among boxes of {self._ndim}.")
        if box.is_empty:
            return np.empty(0, np.int64)
        positions = np.arange(len(self._bounds[-1][0]))
        for level in range(len(self._bounds) - 1, 0, -1):
            low, high = self._bounds[level]
            opened = positions[self._meets(box, low[positions], high[positions])]
            positions = (opened[:, None] * self._FAN + np.arange(self._FAN)).reshape(-1)
            positions = positions[positions < len(self._bounds[level - 1][0])]
        return positions

    @staticmethod
    def _meets(box: Box, low: NDArray[np.int64], high: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = np.ones(len(low), np.bool_)
        for dim, (start, stop) in enumerate(zip(box.offsets, box.stops, strict=True)):
            found &= (low[:, dim] < stop) & (high[:, dim] > start)
        return found


def _neighbours_together(low: NDArray[np.int64]) -> NDArray[np.intp]:
    """An order in which boxes near one another follow one another: by the interleaved bits of their ranks.

    Ranks rather than coordinates, lowest bits first: a dimension on which all boxes agree has no bits, and one with few
    steps does not pull apart what is adjacent on another.
    """
    ranks = [np.unique(low[:, dim], return_inverse=True)[1].reshape(-1) for dim in range(low.shape[1])]
    bits = [int(rank.max(initial=0)).bit_length() for rank in ranks]
    while sum(bits) > 63:
        widest = bits.index(max(bits))
        ranks[widest] = ranks[widest] >> 1
        bits[widest] -= 1
    keys = np.zeros(len(low), np.int64)
    place = 0
    for bit in range(max(bits, default=0)):
        for rank, width in zip(ranks, bits, strict=True):
            if bit < width:
                keys |= ((rank >> bit) & 1) << place
                place += 1
    return np.argsort(keys, kind="stable")
