"""What ranks tell one another in a save, as bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hpdcp._plan.replica_checks import ReplicaReport
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import WriteResults

_ALIGNMENT: Final = 16
"""Of what numpy reads in place."""
_HEAD: Final = struct.Struct("<QQ")
"""As long as that."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank holds, and what it was told to do with it."""

    plan: SavePlan
    """As if the rank were to write all of it."""
    left_out: SavePlan | None
    """`SavePlanner.left_out`."""
    cacheable: bool
    """Whether the plan may be kept for later saves, as far as this rank knows."""
    agreement: Mapping[str, str]
    """`StorageWriter.agreement`."""

    def to_bytes(self) -> bytes:
        rest = b"" if self.left_out is None else self.left_out.to_part(self.plan)
        facts = {"cacheable": str(int(self.cacheable)), "agreement": json.dumps(dict(self.agreement))}
        return _pack(facts, plan=self.plan.to_bytes(), left_out=rest)

    @classmethod
    def from_bytes(cls, data: bytes) -> Proposal:
        parts, facts = _unpack(data)
        plan = SavePlan.from_bytes(parts["plan"])
        left_out = SavePlan.from_part(parts["left_out"], plan) if parts["left_out"] else None
        return cls(plan, left_out, facts["cacheable"] == "1", json.loads(facts["agreement"]))


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the coordinator decided for one rank."""

    plan_id: int
    """Under which all ranks may keep the plan."""
    part: bytes
    """What the rank writes: `SavePlan.to_part` of its local plan, or of its part of the cached plan."""
    begun: bytes
    """What `StorageWriter.begin` tells every rank."""

    def to_bytes(self) -> bytes:
        return _HEAD.pack(self.plan_id, len(self.part)) + self.part + self.begun

    @classmethod
    def from_bytes(cls, data: bytes) -> Assignment:
        plan_id, length = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        return cls(plan_id, data[_HEAD.size : end], data[end:])


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank has done."""

    results: WriteResults
    replicas: ReplicaReport
    """Of what it holds and others do too."""

    def to_bytes(self) -> bytes:
        return _pack({}, results=self.results.to_bytes(), replicas=self.replicas.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> Report:
        parts, _ = _unpack(data)
        return cls(WriteResults.from_bytes(parts["results"]), ReplicaReport.from_bytes(parts["replicas"]))


def _pack(facts: Mapping[str, str], **parts: bytes) -> bytes:
    """JSON of the facts and of what the parts are called, and the parts; all of it aligned."""
    sizes = {name: len(data) for name, data in parts.items()}
    head = json.dumps([dict(facts), sizes]).encode()
    pieces = [len(head).to_bytes(_ALIGNMENT, "little"), *map(_padded, [head, *parts.values()])]
    return b"".join(pieces)


def _unpack(data: bytes) -> tuple[dict[str, memoryview], Mapping[str, str]]:
    length = int.from_bytes(data[:_ALIGNMENT], "little")
    facts, sizes = json.loads(data[_ALIGNMENT : _ALIGNMENT + length])
    whole = memoryview(data)
    position = _ALIGNMENT + _aligned(length)
    parts: dict[str, memoryview] = {}
    for name, size in sizes.items():
        parts[name] = whole[position : position + size]
        position += _aligned(size)
    return parts, facts


def _padded(data: bytes) -> bytes:
    return data + bytes(_aligned(len(data)) - len(data))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
