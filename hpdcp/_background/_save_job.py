"""What a trainer sends to its worker, one save with everything that was decided when it was called; and the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from hpdcp._background._environment import CallEnvironment
from hpdcp._background._messages import Message
from hpdcp._background._sampled import Sampled
from hpdcp._background._specs import PlannerSpec, WriterSpec
from hpdcp._background._staging import StagedState
from hpdcp._comm.exchange import Failed
from hpdcp._files.save_identity import SaveIdentity
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._plan.plan_cache import CachedPlan
from hpdcp._plan.save_plan import SavePlan


class Coordination(Enum):
    """How the ranks' workers reach one another."""

    GLOO = "gloo"
    """A gloo group of the workers' own."""
    STORAGE = "storage"
    """Messages on the storage they save to."""
    NONE = "none"
    """They do not: each rank publishes metadata of its own."""
    SINGLE = "single"
    """There is only one rank."""

    @classmethod
    def from_flags(cls, *, use_collectives: bool, use_gloo: bool, world_size: int) -> Coordination:
        if not use_collectives:
            return cls.NONE
        if world_size == 1:
            return cls.SINGLE
        return cls.GLOO if use_gloo else cls.STORAGE


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One save."""

    identity: SaveIdentity
    """Agreed by all ranks before the call returned."""
    rank: int
    world_size: int
    coordination: Coordination
    master: tuple[str, int]
    """MASTER_ADDR and MASTER_PORT; ("", 0) where no group is built."""
    writer: WriterSpec
    planner: PlannerSpec
    plan: SavePlan | None
    """What this rank holds, or of it what it writes and what is compared; None when staging failed: then `failure` says
    why, and the other ranks must hear of it."""
    staged: StagedState | None = None
    """The copy of all of that; None where the worker asks for it in waves."""
    wave_bytes: int = 0
    """Most that a wave may take."""
    key: str = ""
    """Stands for the planner's cache key; empty for a plan that is not cached."""
    cached: Sequence[CachedPlan] = ()
    """Plans that the trainer has under that key and the worker may not have."""
    known: Sequence[int] = ()
    """Ids of all that the trainer has under that key."""
    rest: SavePlan | None = None
    """What this rank holds beside `plan`, of the same names, where the trainer's plans have other ranks write it; None
    where `plan` is all."""
    sampled: Sampled | None = None
    """What is compared of `rest`."""
    failure: Failed | None = None
    environment: CallEnvironment = dataclasses.field(default_factory=CallEnvironment)
    """In which it was called."""

    def to_message(self) -> tuple[dict[str, Any], bytes]:
        """The facts and the payload of the message that carries it."""
        blobs = {
            "writer": self.writer.pickled,
            "planner": self.planner.pickled,
            "plan": b"" if self.plan is None else self.plan.to_bytes(),
            "rest": b"" if self.plan is None or self.rest is None else self.rest.to_part(self.plan),
            "staged": b"" if self.staged is None else self.staged.to_bytes(),
            "sampled": b"" if self.sampled is None else self.sampled.to_bytes(),
            "config": self.environment.config,
        }
        plans = [plan.to_bytes() for plan in self.cached]
        blobs |= {f"cached.{number}": data for number, data in enumerate(plans)}
        facts = {
            "identity": dataclasses.astuple(self.identity),
            "rank": self.rank,
            "world_size": self.world_size,
            "coordination": self.coordination.value,
            "master": self.master,
            "writer": self.writer.facts,
            "planner": self.planner.options,
            "key": self.key,
            "failure": None if self.failure is None else self.failure.to_json(),
            "known": list(self.known),
            "wave_bytes": self.wave_bytes,
            "variables": dict(self.environment.variables),
            "search_path": list(self.environment.search_path),
            "umask": self.environment.umask,
        }
        payload = pack_columns({name: np.frombuffer(data, dtype=np.uint8) for name, data in blobs.items()}, {})
        return facts, payload

    @classmethod
    def from_message(cls, message: Message) -> SaveJob:
        facts = message.facts
        columns, _ = unpack_columns(message.payload, where="a job")
        blobs = {name: column.tobytes() for name, column in columns.items()}
        plan = SavePlan.from_bytes(blobs["plan"]) if blobs["plan"] else None
        return cls(
            identity=SaveIdentity(*facts["identity"]),
            rank=facts["rank"],
            world_size=facts["world_size"],
            coordination=Coordination(facts["coordination"]),
            master=(facts["master"][0], facts["master"][1]),
            writer=WriterSpec(facts["writer"], blobs["writer"]),
            planner=PlannerSpec(facts["planner"], blobs["planner"]),
            plan=plan,
            staged=StagedState.from_bytes(blobs["staged"]) if blobs["staged"] else None,
            wave_bytes=facts["wave_bytes"],
            key=facts["key"],
            cached=[CachedPlan.from_bytes(data) for name, data in blobs.items() if name.startswith("cached.")],
            known=facts["known"],
            rest=SavePlan.from_part(blobs["rest"], plan) if plan is not None and blobs["rest"] else None,
            sampled=Sampled.from_bytes(blobs["sampled"]) if blobs["sampled"] else None,
            failure=None if facts["failure"] is None else Failed.from_json(facts["failure"]),
            environment=CallEnvironment(blobs["config"], facts["variables"], facts["search_path"], facts["umask"]),
        )


@dataclass(frozen=True, slots=True)
class SaveAnswer:
    """How a save went."""

    replanned: bool
    """Whether the plans that the state was staged by turned out to be known to some ranks only."""
    metadata: bytes = b""
    """What was published."""
    plan: bytes = b""
    """The plan of it, for the trainer's cache; empty where that has it, or none can be cached."""
    failed: Failed | None = None
    """Why nothing was published."""

    def to_message(self) -> tuple[str, dict[str, Any], bytes]:
        """The kind, the facts and the payload of the message that carries it."""
        facts: dict[str, Any] = {"replanned": self.replanned, "metadata": len(self.metadata)}
        if self.failed is not None:
            return "failed", facts | {"error": self.failed.to_json()}, b""
        return "saved", facts, self.metadata + self.plan

    @classmethod
    def from_message(cls, message: Message) -> SaveAnswer:
        replanned, length = message.facts["replanned"], message.facts["metadata"]
        if message.kind == "failed":
            return cls(replanned, failed=Failed.from_json(message.facts["error"]))
        return cls(replanned, message.payload[:length], message.payload[length:])
