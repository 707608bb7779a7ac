"""Boxes in a tensor's global coordinates, by integers only: no torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open box: `offsets[d] <= x[d] < offsets[d] + sizes[d]`; `Box((), ())` is a 0-dim tensor's one cell."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
