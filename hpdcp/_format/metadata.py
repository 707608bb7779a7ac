"""What a checkpoint records: tensors, chunks, where each is stored; and the marks a state dict may carry.

`Metadata` is data, never code: opening one runs nothing of what is in it. It is held as columns
(`hpdcp._format.columns`); the records are made when somebody asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from hpdcp._base.errors import CorruptCheckpointError, UnsupportedFormatError
from hpdcp._format._records import (
    CHUNK_INFO,
    BytesStorageMetadata,
    ChunkInfo,
    ChunkStorageMetadata,
    EntryMetadata,
    MetadataIndex,
    PerRank,
    PerRankStorageMetadata,
    StorageInfo,
    TensorStorageMetadata,
)
from hpdcp._format._seal import UNSEALED, has_seal, is_intact, sealed
from hpdcp._format._shown import count_of, line_of, table_of
from hpdcp._format._soundness import MOST_RANKS, check_columns, check_entries
from hpdcp._format._storage_table import StorageTable
from hpdcp._format.columns import I64, ChunkTable, EntryKind, EntryTable
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.signatures import TORCH_READS, is_pickle, told_by

__all__ = [
    "CHUNK_INFO",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "MOST_RANKS",
    "NO_CHECKSUMS",
    "BytesStorageMetadata",
    "ChunkInfo",
    "ChunkStorageMetadata",
    "EntryMetadata",
    "Metadata",
    "MetadataIndex",
    "PerRank",
    "PerRankStorageMetadata",
    "StorageInfo",
    "StorageTable",
    "TensorStorageMetadata",
    "check_format",
]

FORMAT_NAME: Final = "hpdcp"
FORMAT_VERSION: Final = (1, 3)
"""(major, minor) of what this version writes; a newer major is refused, a newer minor is read."""
NO_CHECKSUMS: Final = "none"
"""The setting `checksums` where nobody recorded any: then no extent has one, instead of one for each block."""

_CHECKSUM_SINCE: Final = 1
"""The minor version from which on the whole file has a checksum."""
_CONTAINER_SETTINGS: Final = frozenset({"checksum", "format", "version"})
"""Settings in the file that are about the file."""

_ALIAS: Final = int(EntryKind.ALIAS)
"""A number, since looking up a member and comparing it with numpy's takes 5 us, several times for every tensor."""


@dataclass(frozen=True, repr=False)
class Metadata:
    """Everything one checkpoint (or one rank, which saved for itself) records. Immutable."""

    entries: EntryTable
    """Sorted by fqn (as UTF-8), then owner."""
    chunks: ChunkTable
    """Sorted by entry, offsets, sizes."""
    storage: StorageTable = field(default_factory=StorageTable.empty)
    """Row for row with `chunks`; empty until the data is written."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Small facts: `world_size`, `attempt`, `layout`, and for one rank alone `rank`, `run`, `ordinal`, `set`. Of files
    that something else wrote: `origin`, and `checksums` where none were recorded."""
    encoded: bytes | None = field(default=None, init=False, compare=False)
    """The file that this was read from, of which the columns are views; None where it was made otherwise."""

    def __repr__(self) -> str:
        return line_of(self.entries, self.storage, self._provenance())

    def _repr_html_(self) -> str:
        """For a cell of a notebook."""
        return table_of(self.entries, self.chunks, self.storage, self._provenance())

    def _provenance(self) -> str:
        return self.origin or f"saved by {count_of(self.world_size, 'rank')}"

    @property
    def world_size(self) -> int:
        """Number of ranks that saved."""
        return int(self.settings.get("world_size", "1"))

    @property
    def has_checksums(self) -> bool:
        """Whether checksums were recorded: hpdcp always does, other writers of weights do not."""
        return self.settings.get("checksums") != NO_CHECKSUMS

    @property
    def origin(self) -> str:
        """Who wrote the files; empty: hpdcp itself."""
        return self.settings.get("origin", "")

    @property
    def state_dict_metadata(self) -> Mapping[str, EntryMetadata]:
        """fqn → what is stored under it; each record is made when it is looked up."""
        return _EntriesByName(self)

    @property
    def files(self) -> Mapping[str, int]:
        """Every data file and its length in bytes."""
        return MappingProxyType(dict(zip(self.storage.file_names, self.storage.file_sizes.tolist(), strict=True)))

    def rows_of(self, fqn: str) -> range:
        """Rows of `entries` with this fqn: none, one, or one for each owner."""
        first = self.entries.fqns.find(fqn)
        if first is None:
            return range(0)
        last = first + 1
        while last < len(self.entries) and self.entries.fqns[last] == fqn:
            last += 1
        return range(first, last)

    def find(self, fqn: str, owner: int | None = None) -> int | None:
        """The row of `entries` for (fqn, owner); None when nothing is stored there."""
        wanted = -1 if owner is None else owner
        return next((row for row in self.rows_of(fqn) if int(self.entries.owners[row]) == wanted), None)

    def find_shared(self, fqns: Sequence[str]) -> I64:
        """As `find` for state that all ranks share, of many names at once; -1 where nothing is stored."""
        # Of rows with one name the first has the least owner, which is none.
        rows = self.entries.fqns.find_all(fqns)
        found = np.flatnonzero(rows >= 0)
        rows[found[self.entries.owners[rows[found]] >= 0]] = -1
        return rows

    def resolve(self, row: int) -> int:
        """The row that stores the bytes of `row`: its own, or its alias target's."""
        if int(self.entries.kinds[row]) != _ALIAS:
            return row
        target = self.find(self.entries.targets[row])
        if target is None:
            name, other = self.entries.fqns[row], self.entries.targets[row]
            raise CorruptCheckpointError(f"{name!r} is recorded as tied to {other!r}, which is not recorded itself.")
        return target

    def chunk_rows(self, row: int) -> range:
        """Rows of `chunks` that belong to entry `row`, its alias target's for an alias."""
        row = self.resolve(row)
        first, last = np.searchsorted(self.chunks.entry, [row, row + 1]).tolist()
        return range(first, last)

    def storage_info(self, chunk_row: int) -> StorageInfo:
        """Where `chunk_row` is stored."""
        table = self.storage
        start, end = int(table.crc_ends[chunk_row - 1]) if chunk_row else 0, int(table.crc_ends[chunk_row])
        return StorageInfo(
            key=table.file_names[int(table.file[chunk_row])],
            offset=int(table.offset[chunk_row]),
            length=int(table.length[chunk_row]),
            checksums=tuple(table.crcs[start:end].tolist()),
        )

    def with_storage(self, storage: StorageTable, settings: Mapping[str, str]) -> Metadata:
        """The same names and chunks, with where they are stored."""
        return replace(self, storage=storage, settings={**self.settings, **settings})

    def to_bytes(self) -> bytes:
        """The metadata file: a safetensors container of columns, with a checksum over all of it."""
        columns = {**self.entries.to_columns(), **self.chunks.to_columns(), **self.storage.to_columns()}
        version = ".".join(map(str, FORMAT_VERSION))
        about = {"checksum": UNSEALED, "format": FORMAT_NAME, "version": version}
        return sealed(pack_columns(columns, {**about, **self.settings}))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, *, where: str) -> Metadata:
        """Read a metadata file; nothing in it is executed.

        Raises:
            CorruptCheckpointError: not a container, not what its checksum says, or its columns contradict each other;
                names `where`.
            UnsupportedFormatError: a newer major version, or another program's file.
        """
        if is_pickle(data):
            raise UnsupportedFormatError(f"{where} was not written by hpdcp: it is {told_by(data)}. {TORCH_READS}")
        columns, settings = unpack_columns(data, where=where)
        check_format(settings, where=where)
        _check_seal(data, settings, where=where)
        try:
            metadata = cls(
                EntryTable.from_columns(columns),
                ChunkTable.from_columns(columns),
                StorageTable.from_columns(columns),
                {key: value for key, value in settings.items() if key not in _CONTAINER_SETTINGS},
            )
            check_columns(metadata.entries, metadata.chunks, metadata.storage, has_checksums=metadata.has_checksums)
            check_entries(metadata.entries, metadata.chunks, metadata.settings, metadata.find)
            if isinstance(data, bytes):
                object.__setattr__(metadata, "encoded", data)
        except (KeyError, ValueError, IndexError) as error:
            raise CorruptCheckpointError(f"{where} is damaged: {error}. Load an earlier checkpoint.") from error
        return metadata


def check_format(settings: Mapping[str, str], *, where: str) -> None:
    """Refuse a container that this version cannot read; unknown minor versions pass."""
    name, version = settings.get("format"), settings.get("version", "")
    if name != FORMAT_NAME:
        raise UnsupportedFormatError(f"{where} is not hpdcp metadata (format {name!r}, expected {FORMAT_NAME!r}).")
    major = version.partition(".")[0]
    if re.fullmatch("[0-9]{1,9}", major) is None or int(major) > FORMAT_VERSION[0]:
        raise UnsupportedFormatError(
            f"{where} has format version {version!r}; this hpdcp reads up to {FORMAT_VERSION[0]}.x. "
            "Upgrade hpdcp to read it."
        )


def _check_seal(data: bytes | memoryview, settings: Mapping[str, str], *, where: str) -> None:
    """Refuse a file in which any bit is not as it was written, where its version has a checksum."""
    if has_seal(data):
        sound = is_intact(data)
    else:
        _, _, minor = settings["version"].partition(".")
        sound = minor.isdigit() and int(minor) < _CHECKSUM_SINCE
    if not sound:
        raise CorruptCheckpointError(
            f"{where} is damaged: it is not what its checksum says it was. Load an earlier checkpoint."
        )


class _EntriesByName(Mapping[str, EntryMetadata]):
    """`Metadata.state_dict_metadata`: a view, records made on look-up."""

    __slots__ = ("_metadata",)

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def __getitem__(self, fqn: str) -> EntryMetadata:
        rows = self._metadata.rows_of(fqn)
        if not rows:
            raise KeyError(fqn)
        owners = self._metadata.entries.owners
        if int(owners[rows[-1]]) < 0:
            return self._record(rows[0])
        return PerRankStorageMetadata({int(owners[row]): self._record(row) for row in rows if owners[row] >= 0})

    def __iter__(self) -> Iterator[str]:
        previous: str | None = None
        for fqn in self._metadata.entries.fqns:
            if fqn != previous:
                yield fqn
            previous = fqn

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{len(self)} names of {self._metadata!r}>"

    def _record(self, row: int) -> TensorStorageMetadata | BytesStorageMetadata:
        metadata = self._metadata
        entry = metadata.entries[row]
        rows = metadata.chunk_rows(row)
        if entry.kind is EntryKind.OBJECT:
            lengths = metadata.storage.length
            return BytesStorageMetadata(int(lengths[rows[0]]) if len(lengths) and rows else 0)
        chunks = tuple(ChunkStorageMetadata(*metadata.chunks.box(chunk)) for chunk in rows)
        return TensorStorageMetadata(entry.dtype, entry.shape, chunks, entry.target or None)
