"""Finding the boxes that meet one, among many; by integers only: no torch, no I/O."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._state.geometry import Box


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
