"""How tensors become files: the contract of a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from hpdcp._base.backend import Backend
from hpdcp._base.errors import NotSupportedError
from hpdcp._format.columns import EntryTable
from hpdcp._format.file_names import DataFileName
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import ReadItem
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.read_targets import ReadTargets
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

    def key(self, suffix: str, part: int = 0) -> str:
        """The name of part number `part` of the file that ends in `suffix`.

        It carries the attempt, so that it never comes twice: whoever is late, writer or reader, meets its own file or
        none. Create it with `exclusive=backend.conditional_create`.
        """
        return DataFileName(self.rank, suffix, self.attempt, part).key


class Layout(ABC):
    """Turns plans into files of one backend, and back.

    A layout whose files are one rank's each, under names of `FileNaming`, implements `write`, `written`, `check` and
    `read`, and leaves the rest as it is. One that makes files of what several ranks hold decides on the coordinator
    (`arrange`), may have ranks send each other what they hold of a box (`redistribute`), and may add files that
    describe the whole (`finish`). One object serves one save or one load.
    """

    name: ClassVar[str]

    settings: Mapping[str, str] = {}
    """Facts that reading needs, which go into the metadata's settings; names begin with the layout's. All ranks write
    by the coordinator's (`adopt`)."""

    plain_extents: ClassVar[bool] = False
    """Whether what is stored of a chunk is its elements and nothing else, in row-major order."""

    redistributes: ClassVar[bool] = False
    """Whether `redistribute` is called, on all ranks, before `write`."""

    needs_all_ranks: ClassVar[bool] = False
    """Whether ranks that save each for itself, without a plan of all, cannot use it."""

    checks_extents: ClassVar[bool] = False
    """Whether what is stored carries checksums of its own, which `check_extent` compares, instead of ones on record."""

    @classmethod
    def recognizes(cls, keys: Collection[str]) -> bool:
        """Whether a folder with these keys at its root holds what another program wrote, and `foreign_metadata` reads.

        Asked only where hpdcp saved nothing. By default none is.
        """
        return False

    @classmethod
    def foreign_metadata(cls, backend: Backend) -> Metadata:
        """What a folder holds that another program wrote in this layout's format; its `origin` says so.

        Called where `recognizes` answers True.
        """
        raise NotSupportedError(f"layout {cls.name!r} reads what hpdcp saved, and {backend.url} is something else.")

    @classmethod
    def is_fixed_name(cls, key: str) -> bool:
        """Whether files of this layout may be called so whatever their attempt: the names that `roots` are made of.

        A file that a save left, or that metadata lists, is removed only if its name is one of `FileNaming` or one of
        these: whoever wrote what lists it may mean harm. So a layout answers True for names that are its own, and not
        for what a user might keep beside them. By default there are none.
        """
        return False

    @classmethod
    def described_extents(cls, backend: Backend, key: str, size: int) -> Collection[tuple[int, int]] | None:
        """(offset, length) of all that the data file `key`, of `size` bytes, says it holds; None where it says nothing.

        `hpdcp verify` compares it with what was recorded, beside checksums. By default files say nothing.

        Raises:
            CorruptCheckpointError: what the file says of itself cannot be read.
        """
        return None

    def check_extent(self, backend: Backend, metadata: Metadata, row: int) -> int:
        """Compare what is stored of a chunk with its own checksums; how many there are. Several threads may call it.

        `hpdcp verify` asks layouts that say `checks_extents`.

        Raises:
            CorruptCheckpointError: says what is wrong with it.
        """
        raise NotImplementedError(f"{type(self).__name__} says that it checks extents, and does not say how.")

    def arrange(
        self, plans: Sequence[SavePlan], metadata: Metadata, locals_: Sequence[SavePlan]
    ) -> tuple[Sequence[SavePlan], Metadata]:
        """The same state in the boxes that this layout stores, and the metadata of these; on the coordinator.

        `locals_` are the local plans that all ranks' `plans` were made of. Where a rank is to write a box that it holds
        in part, the plans of those that hold it say so in their `redistribution`.
        """
        return plans, metadata

    def roots(self, tables: Sequence[EntryTable]) -> frozenset[str]:
        """Names at the checkpoint's root, of files and folders, that a save of these takes whatever its attempt.

        Where there are any, a checkpoint that has them cannot be replaced: saving over it is refused, and no two
        checkpoints share a folder. `is_fixed_name` tells what lies there from a user's files.
        """
        return frozenset()

    def adopt(self, settings: Mapping[str, str]) -> None:
        """Write by `settings`, the coordinator's, in place of one's own; every rank, before anything is stored."""
        self.settings = settings

    def redistribute(self, backend: Backend, plan: SavePlan, planner: SavePlanner, naming: FileNaming) -> None:
        """Store what `plan.redistribution` sends, where the ranks that receive it find it."""
        raise NotImplementedError(f"{type(self).__name__} says that ranks redistribute, and does not say how.")

    def finish(self, backend: Backend, metadata: Metadata, attempt: str) -> Sequence[FileRecord]:
        """On the coordinator, once all is written: add what describes the whole, and remove what was redistributed.

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
        self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem], targets: ReadTargets, verify: Verify
    ) -> None:
        """Fill every item: `apply_bytes` for objects, `acquire_tensor` and then `apply_tensor` for tensors."""
