"""How tensors become files: the contract of a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from hpdcp.backend import Backend
from hpdcp.metadata import Metadata
from hpdcp.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner
from hpdcp.storage import WriteResults


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
    """Turns plans into files of one backend, and back."""

    name: ClassVar[str]

    plain_extents: ClassVar[bool] = False
    """Whether what is stored of a chunk is its elements and nothing else, in row-major order."""

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
