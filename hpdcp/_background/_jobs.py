"""What a trainer hands to its worker: one save, with everything that was decided when it was called."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Final

import numpy as np
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hpdcp._background._link import Message
from hpdcp._background._staging import StagedState
from hpdcp._base.config import Config
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._comm import mailbox
from hpdcp._files.folder_save import SaveIdentity
from hpdcp._files.writer import FileSystemWriter
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._plan.plan_cache import CachedPlan
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.standard_planner import StandardSavePlanner
from hpdcp._plan.storage import StorageWriter


class Coordination(Enum):
    """How the ranks' workers reach one another."""

    GLOO = "gloo"
    """A gloo group of the workers' own."""
    STORAGE = "storage"
    """Messages on the storage they save to."""
    NONE = "none"
    """Each rank's part is a checkpoint of its own."""
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
class WriterSpec:
    """How to make the trainer's storage writer again in the worker."""

    facts: Mapping[str, Any] | None
    """Arguments of a FileSystemWriter."""
    pickled: bytes = b""
    """Any other writer."""

    @classmethod
    def of(cls, writer: StorageWriter) -> WriterSpec:
        """Raises InvalidArgumentError for a writer that cannot be made again in another process."""
        if type(writer) is FileSystemWriter:
            facts = writer.arguments()
            try:
                told = json.loads(json.dumps(facts))
            except (TypeError, ValueError):
                told = None
            # Not where JSON would make a list of a tuple, or text of a number that is a key.
            if told == facts:
                return cls(facts)
        return cls(None, sendable(writer, "storage_writer"))

    def open(self, identity: SaveIdentity) -> StorageWriter:
        """The writer, about to make the save of that identity."""
        writer: StorageWriter = pickle.loads(self.pickled) if self.facts is None else FileSystemWriter(**self.facts)
        if isinstance(writer, FileSystemWriter):
            writer.identity = identity
        return writer


@dataclass(frozen=True, slots=True)
class PlannerSpec:
    """How to make the global plan as the trainer's planner would."""

    options: Mapping[str, bool] | None
    """Arguments of a StandardSavePlanner."""
    pickled: bytes = b""

    @classmethod
    def of(cls, planner: SavePlanner) -> PlannerSpec:
        """Raises InvalidArgumentError for a planner whose global plan cannot be made in another process.

        What a class of the user's own changes in the local plan has happened by then, so such a class need not go
        along unless it makes the global plan itself.
        """
        if isinstance(planner, StandardSavePlanner):
            own = type(planner).build_global_plan is StandardSavePlanner.build_global_plan
            if own and type(planner).finalize_plan is StandardSavePlanner.finalize_plan:
                return cls(planner.options())
        return cls(None, sendable(planner, "planner"))

    def open(self) -> SavePlanner:
        if self.options is not None:
            return StandardSavePlanner(**self.options)
        planner: SavePlanner = pickle.loads(self.pickled)
        return planner


@dataclass(frozen=True, slots=True)
class Job:
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
    """What this rank holds, or of it what it needs; None when staging failed: then `failure` says why, and the other
    ranks must hear of it."""
    staged: StagedState | None = None
    """Where all of that lies; None where the worker asks for it in waves."""
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
    failure: str = ""
    config: bytes = b""
    """The configuration of the call, pickled: options of third parties' backends may be anything."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The trainer's variables at the call: credentials are renewed there while the worker lives."""
    search_path: Sequence[str] = ()
    """Where the trainer looks for modules at the call: packages of backends may have been added."""

    def settings(self) -> dict[str, Any]:
        """Arguments of `config.using` that make the worker's configuration the call's."""
        made: Config = pickle.loads(self.config)
        return {known.name: getattr(made, known.name) for known in dataclasses.fields(made)}

    def to_message(self) -> tuple[dict[str, Any], bytes]:
        """The facts and the payload of the message that carries it."""
        parts = {
            "writer": self.writer.pickled,
            "planner": self.planner.pickled,
            "plan": b"" if self.plan is None else self.plan.to_bytes(),
            "rest": b"" if self.plan is None or self.rest is None else self.rest.to_part(self.plan),
            "staged": b"" if self.staged is None else self.staged.to_bytes(),
            "config": self.config,
        }
        plans = [plan.to_bytes() for plan in self.cached]
        parts |= {f"cached.{number}": data for number, data in enumerate(plans)}
        facts = {
            "identity": dataclasses.astuple(self.identity),
            "rank": self.rank,
            "world_size": self.world_size,
            "coordination": self.coordination.value,
            "master": self.master,
            "writer": self.writer.facts,
            "planner": self.planner.options,
            "key": self.key,
            "failure": self.failure,
            "known": list(self.known),
            "wave_bytes": self.wave_bytes,
            "environment": dict(self.environment),
            "search_path": list(self.search_path),
        }
        payload = pack_columns({name: np.frombuffer(data, dtype=np.uint8) for name, data in parts.items()}, {})
        return facts, payload

    @classmethod
    def from_message(cls, message: Message) -> Job:
        facts = message.facts
        columns, _ = unpack_columns(message.payload, where="a job")
        parts = {name: column.tobytes() for name, column in columns.items()}
        plan = SavePlan.from_bytes(parts["plan"]) if parts["plan"] else None
        return cls(
            identity=SaveIdentity(*facts["identity"]),
            rank=facts["rank"],
            world_size=facts["world_size"],
            coordination=Coordination(facts["coordination"]),
            master=(facts["master"][0], facts["master"][1]),
            writer=WriterSpec(facts["writer"], parts["writer"]),
            planner=PlannerSpec(facts["planner"], parts["planner"]),
            plan=plan,
            staged=StagedState.from_bytes(parts["staged"]) if parts["staged"] else None,
            wave_bytes=facts["wave_bytes"],
            key=facts["key"],
            cached=[CachedPlan.from_bytes(data) for name, data in parts.items() if name.startswith("cached.")],
            known=facts["known"],
            rest=SavePlan.from_part(parts["rest"], plan) if plan is not None and parts["rest"] else None,
            failure=facts["failure"],
            config=parts["config"],
            environment=facts["environment"],
            search_path=facts["search_path"],
        )


DEAD: Final = "dead"
"""In the store, under `workers_key`: the rank whose worker died before it came to the others."""


def workers_key(attempt: str) -> str:
    """Under which the workers of one attempt meet in the store."""
    return f"hpdcp/workers/{attempt}"


def open_store(master: tuple[str, int], deadline: timedelta) -> TCPStore:
    """The store that MASTER_ADDR and MASTER_PORT name; RuntimeError when nothing answers there."""
    host, port = master
    return TCPStore(host, port, is_master=False, timeout=deadline, wait_for_workers=False)


def tell_of_death(job: Job) -> None:
    """Let the other ranks' workers know that this rank's is no more, so that they do not wait for it."""
    if job.coordination is Coordination.STORAGE:
        mailbox.report_dead_worker(job.writer.open(job.identity).open_place(), job.identity.attempt, job.rank)
    elif job.coordination is Coordination.GLOO:
        store = open_store(job.master, timedelta(seconds=10))
        PrefixStore(workers_key(job.identity.attempt), store).set(DEAD, str(job.rank))


def sendable(value: object, argument: str) -> bytes:
    """`value` as bytes that the worker can make it of again.

    Raises:
        InvalidArgumentError: it cannot; names `argument`.
    """
    kind = type(value)
    if kind.__module__ == "__main__":
        raise InvalidArgumentError(
            f"{argument} is a {kind.__qualname__} defined in the script itself, which the background worker cannot "
            "import without running the script again. Move the class to a module of its own."
        )
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise InvalidArgumentError(
            f"{argument} is a {kind.__module__}.{kind.__qualname__} that cannot be sent to the background worker: "
            f"{error}. Let it be pickled, or use save()."
        ) from error
