"""Where a storage reader puts what it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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


class BatchTargets(ABC):
    """Targets that can be asked for many items in one call."""

    @abstractmethod
    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        """As `ReadTargets.acquire_tensor`."""

    @abstractmethod
    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """As `ReadTargets.apply_tensor`."""

    def acquire_tensors(self, items: Sequence[ReadItem]) -> Sequence[torch.Tensor]:
        """What `acquire_tensor` gives, item by item."""
        return [self.acquire_tensor(item) for item in items]

    def apply_tensors(self, items: Sequence[ReadItem], tensors: Sequence[torch.Tensor]) -> None:
        """What `apply_tensor` does, item by item."""
        for item, tensor in zip(items, tensors, strict=True):
            self.apply_tensor(item, tensor)


def acquire_tensors(targets: ReadTargets, items: Sequence[ReadItem]) -> Sequence[torch.Tensor]:
    """The memory of each item."""
    if isinstance(targets, BatchTargets):
        return targets.acquire_tensors(items)
    return [targets.acquire_tensor(item) for item in items]


def apply_tensors(targets: ReadTargets, items: Sequence[ReadItem], tensors: Sequence[torch.Tensor]) -> None:
    """Say that these are filled."""
    if isinstance(targets, BatchTargets):
        targets.apply_tensors(items, tensors)
        return
    for item, tensor in zip(items, tensors, strict=True):
        targets.apply_tensor(item, tensor)
