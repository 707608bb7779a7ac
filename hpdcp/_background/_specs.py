"""How the worker makes the trainer's storage writer and planner again: by their arguments, else by pickle."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._files.save_identity import SaveIdentity
from hpdcp._files.writer import FileSystemWriter
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.standard_save_planner import StandardSavePlanner
from hpdcp._plan.storage import StorageWriter


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
