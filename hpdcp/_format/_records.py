"""What is known of one name, of one chunk, and of where its bytes lie; and the marks that a state dict may carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

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
