"""What every conversion is told, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._comm.exchange import Exchange
from hpdcp._comm.process_group import open_exchange
from hpdcp._convert._location import Location
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata
from hpdcp._state.dtypes import itemsize_of

Progress = Callable[[int, int], None]
"""Called with the bytes of tensors written so far, and of all that this process writes."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion wrote or, dry, would write."""

    src: str
    dst: str
    tensors: Mapping[str, int]
    """Name at the destination → bytes."""
    files: Mapping[str, int]
    """File at the destination → its length in bytes. Empty for a dry run into a checkpoint, which names its files when
    it is written."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Name at the source → why it is left out."""
    copied: tuple[str, ...] = ()
    """Files that are copied along."""
    dry_run: bool = False
    replaced: bool = False
    """Whether something of the kind was at the destination, which is replaced."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.tensors.values())


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """What every conversion is told; each kind has a record of its own with what it is told besides.

    Raises:
        InvalidArgumentError: source and destination are one and the same.
    """

    source: Location
    destination: Location
    dry_run: bool = False
    """Only look, and say what would be written."""
    progress: Progress | None = None
    no_dist: bool = False
    """Convert in this process alone, whatever process group there is."""

    def __post_init__(self) -> None:
        if self.source.is_same_as(self.destination):
            raise InvalidArgumentError(f"src and dst are both {self.source}: convert into another location.")

    def open_exchange(self) -> Exchange:
        """How the ranks that share the work talk."""
        return open_exchange(no_dist=self.no_dist, use_collectives=True)

    def progress_counter(self, total: int) -> Callable[[int], None]:
        """What tells `progress` of each so many bytes, of `total` that this process writes."""
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if self.progress is not None:
                self.progress(done, total)

        return count

    def result(
        self,
        tensors: Mapping[str, int],
        files: Mapping[str, int],
        *,
        replaced: bool,
        skipped: Mapping[str, str] | None = None,
        copied: tuple[str, ...] = (),
    ) -> Conversion:
        """The record of the conversion, done or, dry, planned."""
        return Conversion(
            self.source.url,
            self.destination.url,
            tensors,
            files,
            skipped or {},
            copied,
            dry_run=self.dry_run,
            replaced=replaced,
        )


def tensor_sizes(metadata: Metadata) -> dict[str, int]:
    """Name → bytes of every stored tensor; of state that ranks kept, each rank's under its own name."""
    entries, found = metadata.entries, dict[str, int]()
    volumes = entries.volumes()
    for row in np.flatnonzero(entries.kinds == EntryKind.TENSOR).tolist():
        owner = int(entries.owners[row])
        name = entries.fqns[row] if owner < 0 else f"{entries.fqns[row]} of rank {owner}"
        found[name] = int(volumes[row]) * itemsize_of(entries.dtype(row))
    return found
