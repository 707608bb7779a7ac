"""The contracts of a storage writer and a storage reader, and what a write reports."""

from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._format.checksums import block_checksums
from hpdcp._plan.storage import RankMetadata, StorageReader, StorageWriter
from hpdcp._plan.write_results import FileRecord, WriteResult, WriteResults

__all__ = [
    "FileRecord",
    "RankMetadata",
    "StorageReader",
    "StorageWriter",
    "WriteResult",
    "WriteResults",
    "block_checksums",
    "byte_pieces",
]
