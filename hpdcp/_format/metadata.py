"""What a checkpoint records: tensors, chunks, where each is stored; and the marks a state dict may carry.

`Metadata` is data, never code: opening one runs nothing of what is in it. It is held as columns
(`hpdcp._format.columns`); the records below are made when somebody asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hpdcp._base.errors import CorruptCheckpointError, UnsupportedFormatError
from hpdcp._format.checksums import BLOCK_BYTES
from hpdcp._format.columns import (
    I64,
    ChunkTable,
    EntryKind,
    EntryTable,
    column,
    starts_of,
    strings_from,
    strings_to,
)
from hpdcp._format.container import StringColumn, pack_columns, unpack_columns

FORMAT_NAME: Final = "hpdcp"
FORMAT_VERSION: Final = (1, 0)
"""(major, minor) of what this version writes; a newer major is refused, a newer minor is read."""
MOST_RANKS: Final = 1 << 20
"""Ranks that a checkpoint may say it was saved by; a forged number must not decide how much memory a load takes."""
NO_CHECKSUMS: Final = "none"
"""The setting `checksums` where nobody recorded any: then no extent has one, instead of one for each block."""

_ALIAS: Final = int(EntryKind.ALIAS)
"""A number, since looking up a member and comparing it with numpy's takes 5 us, several times for every tensor."""

CHUNK_INFO: Final = "_hpdcp_chunk_info"
"""Attribute of a plain tensor that says, as a `ChunkInfo`, which box of which global tensor it is."""


@dataclass(frozen=True, slots=True)
class ChunkStorageMetadata:
    """A box on record: half-open, in global coordinates."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorStorageMetadata:
    """One tensor on record."""

    dtype: str
    """torch's name, such as "bfloat16"."""
    size: tuple[int, ...]
    """The global shape."""
    chunks: tuple[ChunkStorageMetadata, ...]
    """Every stored box, by offsets; empty for a tensor without elements."""
    alias_of: str | None = None
    """The fqn that stores the bytes, when this name is tied to it."""


@dataclass(frozen=True, slots=True)
class BytesStorageMetadata:
    """One Python value on record."""

    nbytes: int
    """Length of its encoding."""


@dataclass(frozen=True, slots=True)
class PerRankStorageMetadata:
    """State under `PerRank`: what each rank stored under this fqn."""

    by_rank: Mapping[int, TensorStorageMetadata | BytesStorageMetadata]


EntryMetadata: TypeAlias = TensorStorageMetadata | BytesStorageMetadata | PerRankStorageMetadata


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """Where one chunk's bytes lie."""

    key: str
    """File, relative to the checkpoint's root."""
    offset: int
    """First byte in the file."""
    length: int
    """In bytes."""
    checksums: tuple[int, ...]
    """crc32c of each block of `checksums.BLOCK_BYTES`; empty where none were recorded."""


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """Makes a plain tensor one chunk of a larger one; attach it with `setattr(tensor, CHUNK_INFO, ChunkInfo(...))`."""

    chunk: ChunkStorageMetadata
    """The box the tensor holds; its sizes are the tensor's shape."""
    global_shape: tuple[int, ...]
    replica_rank_list: tuple[int, ...] = ()
    """Ranks that hold the same box; empty when the tensor is its only holder or that is not known."""


@dataclass(frozen=True, slots=True)
class BroadcastInfo:
    """How one destination chunk reaches the ranks that want it."""

    group: tuple[int, ...]
    """Ranks that want the identical chunk, ascending."""
    source: int
    """The rank that reads it."""
    transport_dtype: str
    """torch's name of the dtype on the wire: the stored one, or "uint8" where the process group cannot send it."""
    direct: bool
    """Whether every member receives straight into its target; False: through staging."""
    on_device: bool = False
    """Whether it goes from device to device, in a process group that carries their tensors; False: over hosts."""


@dataclass(frozen=True, slots=True)
class MetadataIndex:
    """Names one item: (fqn, offsets, sizes, owner). Objects have empty offsets and sizes."""

    fqn: str
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    owner: int | None = None
    """The rank, for state under `PerRank`; None for state all ranks share."""


class PerRank:
    """Marks state that differs on every rank (RNG, data loader): stored once per rank, never deduplicated.

    `value` may be any tree of tensors and Python values. After `load` it holds this rank's stored value.
    `PerRank.all(value)` asks `load` for every rank's: `value` becomes a list with one entry per saved rank, whatever
    the number of ranks now.
    """

    __slots__ = ("every_rank", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.every_rank = False

    @classmethod
    def all(cls, value: Any = None) -> PerRank:
        """Ask a load for the values of all ranks that saved; saving one stores `value` like `PerRank(value)`."""
        marked = cls(value)
        marked.every_rank = True
        return marked

    def __repr__(self) -> str:
        return f"PerRank{'.all' if self.every_rank else ''}({self.value!r})"


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


@dataclass(frozen=True)
class Metadata:
    """Everything one checkpoint (or one rank's part of it) records. Immutable."""

    entries: EntryTable
    """Sorted by fqn (as UTF-8), then owner."""
    chunks: ChunkTable
    """Sorted by entry, offsets, sizes."""
    storage: StorageTable = field(default_factory=StorageTable.empty)
    """Row for row with `chunks`; empty until the data is written."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Small facts: `world_size`, `attempt`, `layout`, and for one rank's part `rank`, `run`, `ordinal`. Of files that
    something else wrote: `origin`, and `checksums` where none were recorded."""

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
        """The metadata file: a safetensors container of columns."""
        columns = {**self.entries.to_columns(), **self.chunks.to_columns(), **self.storage.to_columns()}
        version = ".".join(map(str, FORMAT_VERSION))
        return pack_columns(columns, {"format": FORMAT_NAME, "version": version, **self.settings})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, *, where: str) -> Metadata:
        """Read a metadata file; nothing in it is executed.

        Raises:
            CorruptCheckpointError: not a container, or its columns contradict each other; names `where`.
            UnsupportedFormatError: a newer major version, or another program's container.
        """
        columns, settings = unpack_columns(data, where=where)
        check_format(settings, where=where)
        try:
            metadata = cls(
                EntryTable.from_columns(columns),
                ChunkTable.from_columns(columns),
                StorageTable.from_columns(columns),
                {key: value for key, value in settings.items() if key not in ("format", "version")},
            )
            metadata._check()
        except (KeyError, ValueError, IndexError) as error:
            raise CorruptCheckpointError(f"{where} is damaged: {error}. Load an earlier checkpoint.") from error
        return metadata

    def _check(self) -> None:
        """Raise ValueError unless the columns fit together, so that no later look-up can go astray."""
        entries, chunks, storage = self.entries, self.chunks, self.storage
        n, m = len(entries), len(chunks)
        for name, column_, length in (
            ("entry.fqn", entries.fqns, n),
            ("entry.path", entries.paths, n),
            ("entry.target", entries.targets, n),
            ("entry.dtype", entries.dtype_codes, n),
            ("entry.owner", entries.owners, n),
            ("entry.shape", entries.shape_ends, n),
            ("chunk.ends", chunks.ends, m),
            ("storage.file", storage.file, m),
            ("storage.offset", storage.offset, m),
            ("storage.length", storage.length, m),
            ("storage.crc", storage.crc_ends, m),
            ("file.size", storage.file_sizes, len(storage.file_names)),
            ("file.mark", storage.file_marks, len(storage.file_names)),
        ):
            if len(column_) != length:
                raise ValueError(f"column {name} has {len(column_)} rows, expected {length}")
        _check_ends("entry.shape", entries.shape_ends, len(entries.shape_dims))
        _check_ends("chunk", chunks.ends, len(chunks.offsets))
        _check_ends("storage.crc", storage.crc_ends, len(storage.crcs))
        if len(chunks.sizes) != len(chunks.offsets):
            raise ValueError("chunk.sizes and chunk.offsets differ in length")
        _check_codes("entry.dtype", entries.dtype_codes, len(entries.dtype_names))
        _check_codes("entry.kind", entries.kinds, len(EntryKind))
        _check_codes("storage.file", storage.file, len(storage.file_names))
        _check_codes("chunk.entry", chunks.entry, n)
        if m and bool((np.diff(chunks.entry) < 0).any()):
            raise ValueError("chunk rows are not sorted by entry")
        owned = entries.ndims()[chunks.entry]
        if bool((owned != chunks.ends - starts_of(chunks.ends)).any()):
            raise ValueError("a chunk has another number of dimensions than its tensor")
        dims = entries.shape_dims
        first = starts_of(entries.shape_ends)[chunks.entry]
        within = np.arange(len(chunks.offsets), dtype=np.int64) - np.repeat(starts_of(chunks.ends), owned)
        limits = dims[np.repeat(first, owned) + within] if len(chunks.offsets) else dims[:0]
        # Differences, since a sum of two forged numbers may wrap around.
        if bool((dims < 0).any() or (chunks.offsets < 0).any() or (chunks.sizes < 0).any()) or bool(
            (chunks.offsets > limits - chunks.sizes).any()
        ):
            raise ValueError("a chunk reaches beyond its tensor")
        sizes = storage.file_sizes[storage.file] if m else storage.length
        if bool((storage.offset < 0).any() or (storage.length < 0).any() or (storage.file_sizes < 0).any()) or bool(
            (storage.offset > sizes - storage.length).any()
        ):
            raise ValueError("an extent reaches beyond its file")
        blocks = -(-storage.length // BLOCK_BYTES) * int(self.has_checksums)
        if bool((storage.crc_ends - starts_of(storage.crc_ends) != blocks).any()):
            raise ValueError("an extent has another number of checksums than blocks")
        self._check_entries()

    def _check_entries(self) -> None:
        ranks = _count_of("world_size", self.settings.get("world_size", "1"), 1, MOST_RANKS + 1)
        if "rank" in self.settings:
            _count_of("rank", self.settings["rank"], 0, ranks)
        entries = self.entries
        if len(entries) and not -1 <= int(entries.owners.min()) <= int(entries.owners.max()) < ranks:
            raise ValueError(f"column entry.owner names ranks beyond the {ranks} that saved")
        stored = np.bincount(self.chunks.entry, minlength=len(entries))
        if bool(((entries.kinds == EntryKind.OBJECT) & ((stored == 0) | (entries.ndims() > 0))).any()):
            raise ValueError("a Python value has no bytes, or a shape")
        for row in np.flatnonzero(entries.kinds == EntryKind.ALIAS).tolist():
            name, other = entries.fqns[row], entries.targets[row]
            target = self.find(other)
            if target is None or entries.kinds[target] != EntryKind.TENSOR or stored[row]:
                raise ValueError(f"{name!r} is tied to {other!r}, which is no stored tensor")
            if (entries.dtype(row), entries.shape(row)) != (entries.dtype(target), entries.shape(target)):
                raise ValueError(f"{name!r} is tied to {other!r}, which is another tensor")


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


def _count_of(name: str, text: str, least: int, stop: int) -> int:
    """The number that the setting `name` gives; ValueError unless it lies in range(least, stop)."""
    if re.fullmatch("[0-9]{1,9}", text) is None or not least <= int(text) < stop:
        raise ValueError(f"setting {name} is {text[:40]!r}, expected a number from {least} to {stop - 1}")
    return int(text)


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

    def _record(self, row: int) -> TensorStorageMetadata | BytesStorageMetadata:
        metadata = self._metadata
        entry = metadata.entries[row]
        rows = metadata.chunk_rows(row)
        if entry.kind is EntryKind.OBJECT:
            lengths = metadata.storage.length
            return BytesStorageMetadata(int(lengths[rows[0]]) if len(lengths) and rows else 0)
        chunks = tuple(ChunkStorageMetadata(*metadata.chunks.box(chunk)) for chunk in rows)
        return TensorStorageMetadata(entry.dtype, entry.shape, chunks, entry.target or None)


def _check_ends(name: str, ends: I64, total: int) -> None:
    if bool((np.diff(ends, prepend=0) < 0).any()) or (int(ends[-1]) if len(ends) else 0) != total:
        raise ValueError(f"column {name}.ends does not add up to its values")


def _check_codes(name: str, codes: npt.NDArray[np.integer[Any]], count: int) -> None:
    if len(codes) and (int(codes.min()) < 0 or int(codes.max()) >= count):
        raise ValueError(f"column {name} points outside its table of {count}")
