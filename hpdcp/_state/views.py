"""A box of a tensor, in the tensor's own memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def view_of_box(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """What lies in the box at `offsets`, of shape `sizes`, as a view; the tensor itself where that is all of it.

    >>> view_of_box(torch.arange(12).view(3, 4), (1, 2), (2, 1)).tolist()
    [[6], [10]]
    """
    for axis, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, size)
    return tensor
