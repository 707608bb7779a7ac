"""How tensors become files: the contract of a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from hpdcp._base.backend import Backend
from hpdcp._base.errors import NotSupportedError
from hpdcp._format.columns import EntryTable
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import ReadItem
from hpdcp._plan.planner import LoadPlanner, SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import FileRecord, WriteResults


class Verify(Enum):
    """Which checksums a load compares."""

    AUTO = "auto"
    """Every block that a remote backend delivers in full."""
    ALWAYS = "always"
    """Every block that is touched, on any backend; blocks read in part are read whole for it."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FileNaming:
    """Which names one rank's files take in one attempt."""

    rank: int
    attempt: str
    plain: bool
    """Whether the plain names may be taken, by exclusive creation; else names carry the attempt."""

    def names(self, suffix: str, part: int = 0) -> list[tuple[str, bool]]:
        """(key, exclusive) to try in order for part number `part` of the file that ends in `suffix`."""
        number = f".{part}" if part else ""
        unique = (f"_rank{self.rank}_{number}.{self.attempt}{suffix}", True)
        return [(f"_rank{self.rank}_{number}{suffix}", True), unique] if self.plain else [unique]


class Layout(ABC):
    """Turns plans into files of one backend, and back.

    A layout whose files are one rank's each, under names of `FileNaming`, implements `write`, `written`, `check` and
    `read`, and leaves the rest as it is. One that makes files of what several ranks hold decides on the coordinator
    (`arrange`), may have ranks hand over parts to one another (`hand_over`), and may add files that describe the whole
    (`finish`). One object serves one save or one load.
    """

    name: ClassVar[str]

    settings: Mapping[str, str] = {}
    """Facts that reading needs. The coordinator's go to all ranks with `SavePlan.storage_data`, and into the metadata's
    settings; names begin with the layout's."""

    plain_extents: ClassVar[bool] = False
    """Whether what is stored of a chunk is its elements and nothing else, in row-major order."""

    hands_over: ClassVar[bool] = False
    """Whether `hand_over` is called, on all ranks, before `write`."""

    needs_all_ranks: ClassVar[bool] = False
    """Whether ranks that save each for itself, without a plan of all, cannot use it."""

    @classmethod
    def foreign_metadata(cls, backend: Backend) -> Metadata:
        """What a folder holds that another program wrote in this layout's format; its `origin` says so.

        Called where a key at the root bears a name that `registry` lists for this layout, and hpdcp saved nothing.
        """
        raise NotSupportedError(f"layout {cls.name!r} reads what hpdcp saved, and {backend.url} is something else.")

    def arrange(
        self, plans: Sequence[SavePlan], metadata: Metadata, locals_: Sequence[SavePlan]
    ) -> tuple[Sequence[SavePlan], Metadata]:
        """The same state in the boxes that this layout stores, and the metadata of these; on the coordinator.

        `locals_` are the local plans that all ranks' `plans` were made of. Where a rank is to write a box that it holds
        in part, the plans of those that hold it say so in their `hand_over`.
        """
        return plans, metadata

    def roots(self, tables: Sequence[EntryTable]) -> frozenset[str]:
        """Names at the checkpoint's root, of files and folders, that a save of these takes whatever its attempt.

        Where there are any, a checkpoint that has them cannot be replaced, and saving over it is refused.
        """
        return frozenset()

    def hand_over(self, backend: Backend, plan: SavePlan, planner: SavePlanner, naming: FileNaming) -> None:
        """Store what `plan.hand_over` gives, where the ranks that take it find it."""
        raise NotImplementedError(f"{type(self).__name__} says that ranks hand over, and does not say how.")

    def finish(self, backend: Backend, metadata: Metadata, attempt: str) -> Sequence[FileRecord]:
        """On the coordinator, once all is written: add what describes the whole, and remove what was handed over.

        Returns the files added, which hold no chunks.
        """
        return ()

    @abstractmethod
    def write(self, backend: Backend, plan: SavePlan, planner: SavePlanner, naming: FileNaming) -> WriteResults:
        """Store every item durably under names of `naming`; one result for each item, in the plan's order.

        May be called several times in one save, each time with other items of the rank's plan.

        When it raises, the files it wrote may be left; `written` names them.
        """

    @abstractmethod
    def written(self) -> list[str]:
        """Keys this layout object has created so far, finished or not."""

    @abstractmethod
    def check(self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem]) -> None:
        """Raise unless every file the items need is there, whole and the one that was committed.

        Raises:
            KeyNotFoundError: a file is not there.
            CorruptCheckpointError: a file has another length or belongs to another save.
        """

    @abstractmethod
    def read(
        self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem], planner: LoadPlanner, verify: Verify
    ) -> None:
        """Fill every item: `apply_bytes` for objects, `acquire_tensor` and `apply_tensor` for tensors."""
