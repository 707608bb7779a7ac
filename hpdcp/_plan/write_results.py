"""What a write reports: where each item of a rank's plan was stored, and in which files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hpdcp._base.errors import StorageError
from hpdcp._format.columns import I64, column, ends_of, starts_of, take_runs
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import StorageInfo, StorageTable
from hpdcp._format.strings import StringColumn


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One data file that a rank wrote."""

    key: str
    size: int
    """In bytes."""
    mark: int
    """crc32c of its first `checksums.HEAD_BYTES` bytes."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Where one item of the plan was stored."""

    storage: StorageInfo


class WriteResults:
    """What one rank's `execute_write` reports: a result for each item of its plan, in the plan's order."""

    def __init__(self, table: StorageTable, originals: StorageTable | None = None) -> None:
        self.table = table
        self.originals = originals
        """`table` with the lengths and checksums of the items themselves, where the layout stored some of them in
        another form (compressed, padded); None where it stored all of them as they are."""

    @classmethod
    def build(
        cls,
        results: Sequence[WriteResult],
        files: Sequence[FileRecord],
        originals: Sequence[WriteResult] | None = None,
    ) -> WriteResults:
        """From one result for each item of the plan, in order, and every file they name.

        `originals`: where the stored form is another, the same with the lengths and checksums of the items themselves.
        """
        if originals is not None:
            return cls(cls.build(results, files).table, cls.build(originals, files).table)
        position = {record.key: i for i, record in enumerate(files)}
        infos = [result.storage for result in results]
        unknown = sorted({info.key for info in infos} - position.keys())
        if unknown:
            raise StorageError(f"results name files that were not reported: {unknown[:5]}.")
        return cls(
            StorageTable(
                file=np.array([position[info.key] for info in infos], dtype=np.int32),
                offset=np.array([info.offset for info in infos], dtype=np.int64),
                length=np.array([info.length for info in infos], dtype=np.int64),
                crc_ends=ends_of(np.array([len(info.checksums) for info in infos], dtype=np.int64)),
                crcs=np.array([crc for info in infos for crc in info.checksums], dtype=np.uint32),
                file_names=StringColumn.from_strings([record.key for record in files]),
                file_sizes=np.array([record.size for record in files], dtype=np.int64),
                file_marks=np.array([record.mark for record in files], dtype=np.uint32),
            )
        )

    def __len__(self) -> int:
        return len(self.table.file)

    def take(self, rows: I64) -> WriteResults:
        """The results in the order of `rows`, one of which may come twice."""
        originals = None if self.originals is None else _take(self.originals, rows)
        return WriteResults(_take(self.table, rows), originals)

    def as_items(self) -> WriteResults:
        """With the lengths and checksums of the items themselves, whatever form they are stored in."""
        return WriteResults(self.table if self.originals is None else self.originals)

    @classmethod
    def concatenated(cls, parts: Sequence[WriteResults]) -> WriteResults:
        """All rows and all files, one after another."""
        table = _side_by_side([results.table for results in parts])
        if all(results.originals is None for results in parts):
            return cls(table)
        return cls(table, _side_by_side([results.as_items().table for results in parts]))

    @classmethod
    def reunited(cls, parts: Sequence[tuple[I64, WriteResults]]) -> WriteResults:
        """The results of a plan that was written in parts, each given with the rows of the plan it holds."""
        if not parts:
            return cls(StorageTable.empty())
        whole = cls.concatenated([results for _, results in parts])
        return whole.take(np.argsort(np.concatenate([rows for rows, _ in parts]), kind="stable"))

    def to_bytes(self) -> bytes:
        """For the exchange between ranks: columns, no pickle."""
        columns = dict(self.table.to_columns())
        if self.originals is not None:
            others = (self.originals.length, self.originals.crc_ends, self.originals.crcs)
            columns |= dict(zip(_ORIGINALS, others, strict=True))
        return pack_columns(columns, {})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> WriteResults:
        columns, _ = unpack_columns(data, where="a rank's write results")
        table = StorageTable.from_columns(columns)
        if _ORIGINALS[0] not in columns:
            return cls(table)
        length, ends = (column(columns, name, np.int64) for name in _ORIGINALS[:2])
        crcs = column(columns, _ORIGINALS[2], np.uint32)
        return cls(table, replace(table, length=length, crc_ends=ends, crcs=crcs))


_ORIGINALS: Final = ("original.length", "original.crc.ends", "original.crcs")


def _take(table: StorageTable, rows: I64) -> StorageTable:
    crc_ends, positions = take_runs(table.crc_ends, rows)
    return replace(
        table,
        file=table.file[rows],
        offset=table.offset[rows],
        length=table.length[rows],
        crc_ends=crc_ends,
        crcs=table.crcs[positions],
    )


def _side_by_side(tables: Sequence[StorageTable]) -> StorageTable:
    """All rows and all files, table after table."""
    first_file = starts_of(ends_of(np.array([len(table.file_names) for table in tables], dtype=np.int64)))
    files = [table.file.astype(np.int64) + first for table, first in zip(tables, first_file, strict=True)]
    return StorageTable(
        file=np.concatenate(files).astype(np.int32),
        offset=np.concatenate([table.offset for table in tables]),
        length=np.concatenate([table.length for table in tables]),
        crc_ends=ends_of(np.concatenate([table.crc_ends - starts_of(table.crc_ends) for table in tables])),
        crcs=np.concatenate([table.crcs for table in tables]),
        file_names=StringColumn.from_strings([name for table in tables for name in table.file_names]),
        file_sizes=np.concatenate([table.file_sizes for table in tables]),
        file_marks=np.concatenate([table.file_marks for table in tables]),
    )
