"""Where chunks are stored, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hpdcp._format.columns import I64, column, strings_from, strings_to
from hpdcp._format.strings import StringColumn


@dataclass(frozen=True, slots=True)
class StorageTable:
    """Where the rows of a `ChunkTable` are stored, row for row, and the files that hold them."""

    file: npt.NDArray[np.int32]
    """Position in `file_names`."""
    offset: I64
    length: I64
    crc_ends: I64
    """Where each row's checksums end in `crcs`."""
    crcs: npt.NDArray[np.uint32]
    file_names: StringColumn
    file_sizes: I64
    """Whole length of each file in bytes."""
    file_marks: npt.NDArray[np.uint32]
    """Each file's `checksums.head_mark`: tells a swapped or foreign file without reading it all."""

    def to_columns(self) -> dict[str, npt.NDArray[np.generic]]:
        columns: dict[str, npt.NDArray[np.generic]] = {
            "storage.file": self.file,
            "storage.offset": self.offset,
            "storage.length": self.length,
            "storage.crc.ends": self.crc_ends,
            "storage.crcs": self.crcs,
            "file.size": self.file_sizes,
            "file.mark": self.file_marks,
        }
        strings_to(columns, "file.name", self.file_names)
        return columns

    @classmethod
    def from_columns(cls, columns: Mapping[str, npt.NDArray[np.generic]]) -> StorageTable:
        return cls(
            file=column(columns, "storage.file", np.int32),
            offset=column(columns, "storage.offset", np.int64),
            length=column(columns, "storage.length", np.int64),
            crc_ends=column(columns, "storage.crc.ends", np.int64),
            crcs=column(columns, "storage.crcs", np.uint32),
            file_names=strings_from(columns, "file.name"),
            file_sizes=column(columns, "file.size", np.int64),
            file_marks=column(columns, "file.mark", np.uint32),
        )

    def with_files(self, files: Mapping[str, tuple[int, int]]) -> StorageTable:
        """With files, name → (length in bytes, mark), that hold no chunks."""
        if not files:
            return self
        sizes, marks = zip(*files.values(), strict=True)
        return replace(
            self,
            file_names=StringColumn.from_strings([*self.file_names, *files]),
            file_sizes=np.concatenate([self.file_sizes, np.array(sizes, dtype=np.int64)]),
            file_marks=np.concatenate([self.file_marks, np.array(marks, dtype=np.uint32)]),
        )

    @classmethod
    def empty(cls) -> StorageTable:
        none = np.zeros(0, dtype=np.int64)
        crcs = np.zeros(0, dtype=np.uint32)
        return cls(none.astype(np.int32), none, none, none, crcs, StringColumn.from_strings([]), none, crcs)
