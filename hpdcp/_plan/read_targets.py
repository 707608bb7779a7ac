"""Where a storage reader puts what it reads."""

from __future__ import annotations

from typing import Protocol

import torch

from hpdcp._plan.load_plan import ReadItem


class ReadTargets(Protocol):
    """Where the items of a plan go; every `LoadPlanner` is one."""

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        """The target's own memory for this item, shaped `item.lengths`: any device, strides or dtype."""

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """`tensor`, as `acquire_tensor` gave it, now holds the stored values."""

    def apply_bytes(self, item: ReadItem, data: bytes) -> None:
        """The encoding of an object."""
