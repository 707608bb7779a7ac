"""Checksums of samples that the trainer takes of what it does not stage, for its worker to compare."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpdcp._format.columns import ends_of
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import MetadataIndex
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.save_plan import SavePlan


@dataclass(frozen=True, slots=True)
class Sampled:
    """Boxes, and `SavePlanner.get_checksums` of each."""

    plan: SavePlan
    checksums: Sequence[tuple[int, ...]]

    @classmethod
    def of(cls, planner: SavePlanner, plan: SavePlan) -> Sampled:
        return cls(plan, planner.get_checksums(plan))

    def by_index(self) -> dict[MetadataIndex, tuple[int, ...]]:
        """The checksums by box."""
        return {item.index: crcs for item, crcs in zip(self.plan.items, self.checksums, strict=True)}

    def to_bytes(self) -> bytes:
        """For another process."""
        return pack_columns(
            {
                "plan": np.frombuffer(self.plan.to_bytes(), dtype=np.uint8),
                "ends": ends_of(np.array([len(crcs) for crcs in self.checksums], dtype=np.int64)),
                "crcs": np.array([crc for crcs in self.checksums for crc in crcs], dtype=np.uint32),
            },
            {},
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Sampled:
        columns, _ = unpack_columns(data, where="checksums of samples")
        crcs: list[int] = columns["crcs"].tolist()
        bounds = itertools.pairwise([0, *columns["ends"].tolist()])
        return cls(SavePlan.from_bytes(columns["plan"].tobytes()), [tuple(crcs[start:end]) for start, end in bounds])
