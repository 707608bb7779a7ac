"""Whether boxes cover another one, by integers only: no torch, no I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpdcp._state.geometry import Box, intersect

_PAIRWISE = 8
"""Up to so many boxes are compared pair by pair; beyond, the grid is quicker."""


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
