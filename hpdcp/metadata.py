"""What a checkpoint records, and the marks that a state dict may carry."""

from hpdcp._format.checksums import BLOCK_BYTES, HEAD_BYTES
from hpdcp._format.metadata import (
    CHUNK_INFO,
    FORMAT_NAME,
    FORMAT_VERSION,
    NO_CHECKSUMS,
    BytesStorageMetadata,
    ChunkInfo,
    ChunkStorageMetadata,
    EntryMetadata,
    Metadata,
    MetadataIndex,
    PerRank,
    PerRankStorageMetadata,
    StorageInfo,
    StorageTable,
    TensorStorageMetadata,
)
from hpdcp._plan.shared_boxes import BroadcastInfo

__all__ = [
    "BLOCK_BYTES",
    "BroadcastInfo",
    "BytesStorageMetadata",
    "CHUNK_INFO",
    "ChunkInfo",
    "ChunkStorageMetadata",
    "EntryMetadata",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "HEAD_BYTES",
    "Metadata",
    "MetadataIndex",
    "NO_CHECKSUMS",
    "PerRank",
    "PerRankStorageMetadata",
    "StorageInfo",
    "StorageTable",
    "TensorStorageMetadata",
]
