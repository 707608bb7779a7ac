"""Tensors that share elements in memory, without being asked to: filled one after the other, the last one wins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hpdcp._devices.memory import memory_range
from hpdcp._state.box_index import BoxIndex
from hpdcp._state.geometry import Box

_MOST_COUNTED: Final = 1 << 22
"""Elements of a tensor of odd strides that are counted one by one; with more it is taken for one that overlaps."""
_MOST_WORK: Final = 100_000
"""Steps that numpy may take over one pair of odd strides; a pair that needs more is taken for one that overlaps."""


def shared_elements(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Numbers of pairs of tensors that have a byte of memory in common; not all pairs, but one where there is any.

    Views that lie between one another's elements, such as columns of one matrix, share none. Takes n log n steps for
    n tensors that are contiguous, or views of one contiguous tensor; only others are compared pair by pair.

    >>> base = torch.zeros(6)
    >>> list(shared_elements([base[:3], base[3:], base[2:5:2]]))
    [(0, 2)]
    """
    spans = [memory_range(tensor) for tensor in tensors]
    starts = np.array([span.start for span in spans], dtype=np.uint64)
    stops = np.array([span.stop for span in spans], dtype=np.uint64)
    for group in meeting_groups([tensor.device for tensor in tensors], starts, stops):
        yield from _in_group(tensors, group)


def meeting_groups(
    devices: Sequence[torch.device], starts: npt.NDArray[np.uint64], stops: npt.NDArray[np.uint64]
) -> Iterator[list[int]]:
    """Groups of spans of memory that may share a byte, as their numbers by where they start; none with any other group.

    A span that stops at 0 is empty, and in no group.
    """
    codes = {device: code for code, device in enumerate(dict.fromkeys(devices))}
    device_of = np.fromiter(map(codes.__getitem__, devices), np.int64, len(devices))
    for code in range(len(codes)):
        numbers = np.flatnonzero((device_of == code) & (stops > 0))
        order = numbers[np.argsort(starts[numbers], kind="stable")]
        furthest = np.maximum.accumulate(stops[order])
        # A span that starts after the end of all that start before it begins a new group.
        begins = np.flatnonzero(starts[order][1:] >= furthest[:-1]) + 1
        for first, last in _runs_of_several(begins, len(order)):
            yield order[first:last].tolist()


def _runs_of_several(begins: npt.NDArray[np.intp], count: int) -> Iterator[tuple[int, int]]:
    """Where groups of more than one begin and end, when a new group begins at each of `begins`, out of `count`."""
    bounds = np.concatenate([[0], begins, [count]])
    several = np.flatnonzero(np.diff(bounds) > 1)
    yield from zip(bounds[several].tolist(), bounds[several + 1].tolist(), strict=True)


def has_shared_elements(tensor: torch.Tensor) -> bool:
    """Whether elements of one tensor share memory, as those of `expand` and of windows by `as_strided` do."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    axes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    if axes[0][0] == 0 or tensor.numel() > _MOST_COUNTED:
        return True
    places = np.zeros(1, dtype=np.int64)
    for stride, size in axes:
        places = np.add.outer(places, np.arange(size) * stride).reshape(-1)
    return len(np.unique(places)) < len(places)


def _in_group(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs among tensors whose spans, in order of their starts, meet."""
    if all(tensors[number].is_contiguous() for number in numbers):
        yield from _meeting_spans(tensors, numbers)
        return
    boxes = _on_one_grid([tensors[number] for number in numbers])
    if boxes is None:
        for one, other in _meeting_spans(tensors, numbers, all_pairs=True):
            if _share(tensors[one], tensors[other]):
                yield one, other
        return
    index = BoxIndex(np.array([box.offsets for box in boxes]), np.array([box.sizes for box in boxes]))
    for place, box in enumerate(boxes):
        for other_place in index.overlapping(box).tolist():
            if other_place > place:
                yield numbers[place], numbers[other_place]
                break


def _meeting_spans(
    tensors: Sequence[torch.Tensor], numbers: Sequence[int], *, all_pairs: bool = False
) -> Iterator[tuple[int, int]]:
    """Pairs whose spans meet; unless `all_pairs`, of each tensor with the one before it that reaches furthest."""
    open_spans: list[tuple[int, int]] = []
    for number in numbers:
        span = memory_range(tensors[number])
        open_spans = [(stop, before) for stop, before in open_spans if stop > span.start]
        for _, before in open_spans:
            yield before, number
        open_spans.append((span.stop, number))
        if not all_pairs:
            open_spans = [max(open_spans)]


def _on_one_grid(tensors: Sequence[torch.Tensor]) -> list[Box] | None:
    """The tensors as boxes of bytes of one contiguous tensor that all are views of; None where they are not.

    The strides of such views are the strides of the tensor, each a multiple of the next.
    """
    axes = [_byte_axes(tensor) for tensor in tensors]
    strides = sorted({stride for along in axes for stride, _ in along}, reverse=True)
    if any(wide % narrow for wide, narrow in itertools.pairwise(strides)):
        return None
    spans = [memory_range(tensor).start for tensor in tensors]
    origin = min(
        start - tensor.storage_offset() * tensor.element_size() for start, tensor in zip(spans, tensors, strict=True)
    )
    limits = [math.inf, *(wide // narrow for wide, narrow in itertools.pairwise(strides))]
    boxes: list[Box] = []
    for start, along in zip(spans, axes, strict=True):
        sizes_of = dict(along)
        if len(sizes_of) < len(along):
            return None
        rest = int(start - origin)
        offsets: list[int] = []
        sizes: list[int] = []
        for stride, limit in zip(strides, limits, strict=True):
            offset, rest = divmod(rest, stride)
            size = sizes_of.get(stride, 1)
            if offset + size > limit:
                return None
            offsets.append(offset)
            sizes.append(size)
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def _byte_axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride in bytes and size of every axis along which there is more than one element, and of an element's bytes."""
    itemsize = tensor.element_size()
    along = zip(tensor.stride(), tensor.shape, strict=True)
    return [*((stride * itemsize, size) for stride, size in along if size > 1 and stride), (1, itemsize)]


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        # numpy's types know of no other bound than none and the cheapest.
        most: Any = _MOST_WORK
        return bool(np.shares_memory(_Described(one).array(), _Described(other).array(), max_work=most))
    except np.exceptions.TooHardError:
        return True


class _Described:
    """A tensor as numpy describes arrays. What describes one is never read, so that it may be a device's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        itemsize = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": f"|V{itemsize}",
            "data": (memory_range(tensor).start, True),
            "strides": tuple(stride * itemsize for stride in tensor.stride()),
        }

    def array(self) -> np.ndarray[Any, Any]:
        return np.asarray(self)
