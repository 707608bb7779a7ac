"""The contracts of a storage writer and a storage reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from hpdcp._base import config
from hpdcp._base.backend import Backend
from hpdcp._base.errors import NotSupportedError
from hpdcp._base.renames import warn_renamed
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.read_targets import ReadTargets
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import WriteResults


class StorageWriter(ABC):
    """Executes save plans on some storage. One save calls, in this order:

    1. `initialize_writer`     every rank, only when `save` was given a `checkpoint_id` as well
    2. `configure_writer`      every rank
    3. `agreement`             every rank; what they return is compared
    4. `optimize_local_plan`   every rank; nothing may be changed on storage yet
    5. `arrange_global_plan`   the coordinator, over all ranks' final plans (without collectives: every rank, its own);
                               skipped where an earlier plan is used again
    6. `optimize_global_plan`  the coordinator, likewise; still nothing may be changed
    7. `begin`                 the coordinator, likewise: from here on storage is changed
    8. `join`                  every rank, with what `begin` returned
    9. `redistribute`          every rank, only where `redistributes`; ends on all ranks before 10 begins on any
    10. `execute_write`        every rank, once or more; its data is durable when it returns
    11. `finalize_checkpoint`  the coordinator, once every rank has written everything: the commit
    12. `all_published`        every rank, only in a `save` without collectives that has ended on all ranks
    13. `discard`              instead of 11 every rank, when some rank failed: remove what this rank wrote

    An exception in any step on any rank makes every rank raise, and nothing is published.
    """

    def initialize_writer(self, checkpoint_id: str | Path) -> None:
        """Take the location to save to."""
        raise NotSupportedError(
            f"{type(self).__name__} takes no checkpoint_id; leave it out, or implement initialize_writer."
        )

    @property
    def location(self) -> str | None:
        """Where it saves to, as messages name it; None when that is nothing that a backend can open."""
        return self.place

    @property
    def place(self) -> str | None:
        """The earlier name of `location`, which a writer may still implement in its stead."""
        return None

    def open_location(self) -> Backend:
        """A backend at `location`, for what ranks tell one another through storage."""
        return self.open_place()

    def open_place(self) -> Backend:
        """The earlier name of `open_location`, which a writer may still implement in its stead."""
        raise NotSupportedError(f"{type(self).__name__} saves to no location that a backend can open.")

    def cache_key(self) -> Hashable | None:
        """Equal for two saves exactly when this writer arranges equal plans alike, so that one's may serve the other;
        None: never use a plan again.

        It tells what `arrange_global_plan` depends on beside the configuration: a class that overrides that one and not
        this one always plans in full. Asked of a writer that is not configured as well.
        """
        return ()

    @abstractmethod
    def configure_writer(self, context: PlannerContext) -> None:
        """Start a new save."""

    def agreement(self) -> Mapping[str, str]:
        """What all ranks must have been given alike, under the name that an error calls it by.

        A save in which ranks differ fails before anything is planned.
        """
        return {}

    def optimize_local_plan(self, plan: SavePlan) -> SavePlan:
        """A plan of the same items, better suited to this storage."""
        return plan

    def arrange_global_plan(
        self, plans: Sequence[SavePlan], metadata: Metadata, locals_: Sequence[SavePlan]
    ) -> tuple[Sequence[SavePlan], Metadata]:
        """The same state in the boxes that this storage can hold, and the metadata of these.

        `locals_` are the local plans that the plans were made of.
        """
        return plans, metadata

    def optimize_global_plan(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """The same items in plans better suited to this storage.

        They may carry `storage_data` for the ranks that write them. Where that is all that changes, and it is alike
        for all ranks, the plans are kept for the next save of the same state.
        """
        return list(plans)

    def begin(self, metadata: Metadata) -> bytes:
        """Take the location for this save, and clear what crashed saves left there; what every rank's `join` is given.

        `metadata` is of what will be stored, its storage still empty.
        """
        return b""

    def join(self, begun: bytes) -> None:
        """Take part in the save that the coordinator has begun; `begun` is what its `begin` returned."""
        return

    @property
    def redistributes(self) -> bool:
        """Once configured: whether `redistribute` is to be called. Equal on all ranks."""
        return False

    def redistribute(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Store, where other ranks find it, what the plan's `redistribution` sends them."""
        return

    @abstractmethod
    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        """Store every item of the plan, durably; one result for each, in the plan's order."""

    @abstractmethod
    def finalize_checkpoint(self, metadata: Metadata, results: Sequence[WriteResults]) -> Metadata:
        """Publish `metadata`, which holds all of `results` already, in one atomic step; returns what was published.

        An error means that nothing was published, and `discard` follows; one that leaves it open is a
        CommitUncertainError, and nothing is removed.
        """

    def all_published(self) -> None:
        """Once every rank has published, in a save without collectives that ends on all ranks together."""
        return

    def discard(self) -> None:
        """Remove what this rank has written in this save; called where it is certain that nothing was published."""
        return


class StorageReader(ABC):
    """Executes load plans on some storage. One load calls, in this order:

    1. `initialize_reader`    every rank, only when `load` was given a `checkpoint_id` as well
    2. `load_metadata`        the coordinator (without collectives: every rank); the others are sent its answer
    3. `configure_reader`     every rank, with the metadata
    4. `optimize_local_plan`  every rank; the place to find that a file is missing, before any target is changed
    5. `optimize_global_plan` the coordinator, over all ranks' plans
    6. `execute_read`         every rank

    An exception in any step on any rank makes every rank raise.
    """

    @property
    def allow_pickle(self) -> bool:
        """Whether objects of this checkpoint may be unpickled, which can run code from it; as configured."""
        return config.current().allow_pickle

    @property
    def shares_page_cache(self) -> bool:
        """Whether ranks of one host that read the same bytes fetch them once; then broadcasting them gains nothing."""
        return False

    @property
    def max_concurrent_reads(self) -> int:
        """Calls of `execute_read` that one rank may have in flight, from threads; more than one where each of them
        waits for a network."""
        earlier: int | None = getattr(self, "reads_at_once", None)
        if earlier is None:
            return 1
        warn_renamed(f"{type(self).__name__}.reads_at_once", "max_concurrent_reads")
        return earlier

    @property
    def mismatch_advice(self) -> str:
        """What else to do where names are wanted that are not stored, once configured; it ends the error's message."""
        return ""

    def initialize_reader(self, checkpoint_id: str | Path) -> None:
        """Take the location to load from."""
        raise NotSupportedError(
            f"{type(self).__name__} takes no checkpoint_id; leave it out, or implement initialize_reader."
        )

    @abstractmethod
    def load_metadata(self) -> Metadata:
        """The global metadata, fresh.

        Raises:
            CheckpointNotFoundError, IncompleteCheckpointError: there is none.
        """

    def load_rank_metadata(self, rank: int) -> RankMetadata | None:
        """What ranks that saved without collectives left, as `rank` sees it; None when there is no such thing.

        Raises:
            IncompleteCheckpointError: there is some, but not one whole save.
        """
        return None

    @abstractmethod
    def configure_reader(self, metadata: Metadata, context: PlannerContext) -> None:
        """Start a new load."""

    def optimize_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """A plan that reads the same, better suited to this storage; raises where a file it needs is not sound."""
        return plan

    def optimize_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        """All ranks' plans, better suited to this storage."""
        return list(plans)

    @abstractmethod
    def execute_read(self, plan: LoadPlan, targets: ReadTargets) -> None:
        """Fill every item of the plan. `targets` is the planner, or memory from which a broadcast is sent."""


class RankMetadata(ABC):
    """A complete set of per-rank metadata, as a save without collectives leaves it."""

    save_id: str = ""
    """The same for all that look at one save; empty where nothing tells."""
    superseded: bool = False
    """Whether a later save has begun to replace it, and has not ended on all ranks: others may see another one."""
    keys: Sequence[str] = ()
    """Where each rank's part lies, in order of rank; empty where that is not told."""

    @abstractmethod
    def own(self, world_size: int) -> Metadata | None:
        """What this rank stored, when `world_size` ranks load and as many saved; else None."""

    @abstractmethod
    def merged(self) -> Metadata:
        """What all ranks stored, as one."""
