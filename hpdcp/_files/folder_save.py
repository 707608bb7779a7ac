"""One save of one folder, as one rank sees it: which names it takes, and what it publishes."""

from __future__ import annotations

import itertools
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hpdcp._base import progress
from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointExistsError, NotSupportedError
from hpdcp._base.timing import log_message
from hpdcp._comm.identity import run_id
from hpdcp._files.commit import Attempt, claimed_attempt, publish_or_doubt, read_or_none, refuse_taken
from hpdcp._files.layout import FileNaming, Layout
from hpdcp._format.file_names import METADATA, is_data_key, rank_metadata_key, rank_of_metadata_key
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import WriteResults

_ordinals: dict[tuple[str, str, int], itertools.count[int]] = {}
"""(run, folder, world size) → this process's saves there that are counted at the door, so that all ranks agree."""


@dataclass(frozen=True, slots=True)
class SaveIdentity:
    """What tells one save from others, settled when it was called; the coordinator draws an attempt where it is not."""

    attempt: str
    run: str
    """Equal on all ranks of a run; counts without collectives."""
    ordinal: int
    """Which of the run's saves to this place without collectives."""


def next_ordinal(run: str, url: str, world_size: int) -> int:
    """Counts this process's saves to one place; what it saves alone is not counted with what all ranks save."""
    return next(_ordinals.setdefault((run, url, world_size), itertools.count(1)))


@dataclass(frozen=True, slots=True)
class SaveSetup:
    """What a save is made with."""

    backend: Backend
    layout: Layout
    context: PlannerContext
    keep_replaced_for: float
    """Seconds."""
    identity: SaveIdentity | None
    """None where it is settled when the save begins."""


class FolderSave(ABC):
    """One save of one folder, as one rank sees it."""

    def __init__(self, setup: SaveSetup) -> None:
        if setup.backend.process_local and setup.context.world_size > 1:
            raise NotSupportedError(
                f"{setup.backend.url} is seen by one process alone, and {setup.context.world_size} ranks are to save "
                "there together. Choose another place, or save each for itself with no_dist=True."
            )
        self.attempt = uuid.uuid4().hex[:16] if setup.identity is None else setup.identity.attempt
        self.backend = setup.backend
        self.layout = setup.layout
        self.context = setup.context
        self.keep_replaced_for = setup.keep_replaced_for
        self.facts = {"layout": setup.layout.name, "world_size": str(setup.context.world_size), **setup.layout.settings}

    @abstractmethod
    def begin(self, plans: Sequence[SavePlan]) -> dict[str, str]:
        """Look at the folder and decide what all ranks that write in this save, by `plans`, are told."""

    @abstractmethod
    def commit(self, metadata: Metadata) -> Metadata:
        """Publish `metadata`; what was published."""

    def write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        """Store the plan's items under names that `begin` decided."""
        return self.layout.write(progress.counted(self.backend), plan, planner, self._naming(plan))

    def hand_over(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Store what other ranks write as a part of theirs."""
        self.layout.hand_over(self.backend, plan, planner, self._naming(plan))

    def _naming(self, plan: SavePlan) -> FileNaming:
        decided = plan.storage_data
        return FileNaming(self.context.rank, decided["attempt"], decided["plain"] == "1")

    def _told(self, attempt: str, *, plain: bool) -> dict[str, str]:
        return {"attempt": attempt, "plain": "1" if plain else "0", **self.layout.settings}

    def _whole(self, metadata: Metadata, attempt: str) -> Metadata:
        """`metadata` with the files that describe the whole, and this save's facts."""
        # A planner that writes another save's state again says how many ranks that one had.
        planned = {key: value for key, value in metadata.settings.items() if key == "world_size"}
        planned = planned if self.context.collective else {}
        with_facts = metadata.with_storage(metadata.storage, {**self.facts, **planned})
        added = self.layout.finish(self.backend, with_facts, attempt)
        files = {record.key: (record.size, record.mark) for record in added}
        return with_facts.with_storage(metadata.storage.with_files(files), {})

    def _roots(self, plans: Sequence[SavePlan]) -> frozenset[str]:
        return self.layout.roots([plan.entries for plan in plans])

    def discard(self) -> None:
        """Remove what this rank has written."""
        self.backend.delete(self.layout.written())


class SaveByAll(FolderSave):
    """All ranks as one: the coordinator claims the folder and publishes `.metadata`."""

    _used: str | None = None
    """The attempt that this rank has written in."""

    def begin(self, plans: Sequence[SavePlan]) -> dict[str, str]:
        self._claimed = Attempt.begin(self.backend, self.attempt, self._roots(plans))
        claim = self._claimed.claim
        return self._told(claim.attempt, plain=claim.plain)

    def write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        self._used = plan.storage_data["attempt"]
        return super().write(plan, planner)

    def hand_over(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._used = plan.storage_data["attempt"]
        super().hand_over(plan, planner)

    def discard(self) -> None:
        written = self.layout.written()
        # Fixed names may be another save's by now; its files are not ours to remove.
        if self._used is not None and not all(is_data_key(key) for key in written):
            current = claimed_attempt(self.backend)
            written = [key for key in written if is_data_key(key) or current == self._used]
        self.backend.delete(written)

    def commit(self, metadata: Metadata) -> Metadata:
        attempt = self._claimed.claim.attempt
        if self._claimed.claim.made and not self._claimed.is_current:
            raise self._claimed.superseded("another attempt claimed it")
        self.facts["attempt"] = attempt
        whole = self._whole(metadata, attempt)
        self._claimed.commit(whole, keep_replaced_for=self.keep_replaced_for)
        return whole


class SaveByRank(FolderSave):
    """Without collectives: each rank publishes `{rank}.metadata` and knows only what it finds in the folder."""

    def __init__(self, setup: SaveSetup) -> None:
        super().__init__(setup)
        if setup.layout.needs_all_ranks and setup.context.world_size > 1:
            raise NotSupportedError(
                f"layout {setup.layout.name!r} needs the plans of all ranks, and without collectives no rank knows "
                "another's. Save with use_collectives=True, in layout 'safetensors', or from one process alone "
                "(no_dist=True)."
            )
        identity = setup.identity
        if identity is None:
            # Counted before anything of this rank can fail, so that a rank that does stays in step with the others.
            run = run_id()
            identity = SaveIdentity(self.attempt, run, next_ordinal(run, self.backend.url, self.context.world_size))
        self.facts |= {"rank": str(self.context.rank), "run": identity.run, "ordinal": str(identity.ordinal)}

    def begin(self, plans: Sequence[SavePlan]) -> dict[str, str]:
        run = self.facts["run"]
        self.backend.prepare()
        keys = [info.key for info in self.backend.list_keys()]
        self._refuse_strangers(keys, run)
        roots = self._roots(plans)
        if roots:
            committed = next((key for key in keys if rank_of_metadata_key(key) is not None), METADATA)
            refuse_taken(self.backend, keys, roots, read_or_none(self.backend, committed))
        own = rank_metadata_key(self.context.rank)
        before = read_or_none(self.backend, own) if own in keys else None
        self._replaced = set() if before is None else set(Metadata.from_bytes(before, where=own).files)
        self.facts["attempt"] = self.attempt
        return self._told(self.attempt, plain=self.backend.conditional_create)

    def _refuse_strangers(self, keys: Sequence[str], run: str) -> None:
        """Without collectives nobody can say that another run's checkpoint is done with, so it is not touched."""
        url = self.backend.url
        advice = f"Save to an empty folder, or remove the old checkpoint first: hpdcp rm {url}."
        if METADATA in keys:
            raise CheckpointExistsError(f"{url} holds a checkpoint that all ranks saved together. {advice}")
        rank, world_size = self.context.rank, self.context.world_size
        there = sorted(found for key in keys if (found := rank_of_metadata_key(key)) is not None)
        # One's own, the first and those beyond this world tell a stranger; opening all would be ranks squared.
        for other in sorted({*there[:1], *(r for r in there if r >= world_size), *({rank} & set(there))}):
            key = rank_metadata_key(other)
            data = read_or_none(self.backend, key)
            if data is None:
                continue
            settings = Metadata.from_bytes(data, where=f"{url}/{key}").settings
            if settings.get("run") != run or settings.get("world_size") != str(world_size):
                raise CheckpointExistsError(
                    f"{url} holds {key}, which another run saved (run {settings.get('run')!r}, this is {run!r}). "
                    f"{advice} A restarted job that may overwrite its own sets HPDCP_RUN_ID."
                )

    def commit(self, metadata: Metadata) -> Metadata:
        whole = self._whole(metadata, self.attempt)
        publish_or_doubt(self.backend, rank_metadata_key(self.context.rank), whole.to_bytes())
        try:
            self.backend.delete(self._replaced - set(whole.files))
        except Exception as error:  # noqa: BLE001  # an error from here would have the published files removed
            log_message(logging.WARNING, f"{self.backend.url}: old files could not be removed: {error}")
        return whole


def forget_ordinals() -> None:
    """Count saves without collectives from one again; for tests that play several runs in one process."""
    _ordinals.clear()
