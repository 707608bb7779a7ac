"""Work of bounded size: some rows of an array, batches of what follows one another, shares of equal weight."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def cut_rows(sizes: Sequence[int], most: int) -> tuple[int, list[tuple[int, int]]]:
    """How to cut an array of shape `sizes` so that at most `most` elements are together.

    Returns the axis to cut, the first that has more than one row, and the (start, length) of rows along it. It is
    one row where even that has more than `most` elements: cut it again.

    >>> cut_rows((1, 5, 4), 8)
    (1, [(0, 2), (2, 2), (4, 1)])
    >>> cut_rows((2, 4), 2)
    (0, [(0, 1), (1, 1)])
    """
    axis = next((axis for axis, size in enumerate(sizes) if size > 1), 0)
    rows = max(1, most * sizes[axis] // max(1, math.prod(sizes)))
    return axis, [(start, min(rows, sizes[axis] - start)) for start in range(0, sizes[axis], rows)]


def batches(items: Iterable[T], weight: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """The items in order, in batches that weigh at most `most` together; what weighs more is a batch by itself.

    >>> list(batches(["ab", "c", "defgh", "i", "j"], len, 3))
    [['ab', 'c'], ['defgh'], ['i', 'j']]
    """
    batch: list[T] = []
    total = 0
    for item in items:
        weighs = weight(item)
        if batch and total + weighs > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += weighs
    if batch:
        yield batch


def assign_evenly(weights: Iterable[int], workers: int) -> list[int]:
    """Who does what weighs so much: whoever has the least so far, the first of several.

    Within 4/3 of the best possible for the one who has most, where the heaviest comes first (LPT scheduling).

    >>> assign_evenly([5, 3, 3, 1], 2)
    [0, 1, 1, 0]
    """
    loads = [(0, worker) for worker in range(workers)]
    chosen: list[int] = []
    for weight in weights:
        load, worker = loads[0]
        heapq.heapreplace(loads, (load + weight, worker))
        chosen.append(worker)
    return chosen
