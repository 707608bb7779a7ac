"""Distributed checkpoints of PyTorch training state: every rank saves its shards, any layout loads them again."""

from hpdcp import config
from hpdcp.api import load, save
from hpdcp.filesystem_storage import FileSystemReader, FileSystemWriter
from hpdcp.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, Metadata, PerRank
from hpdcp.optimizer_state import allocate_optimizer_state
from hpdcp.ragged import RaggedShard
from hpdcp.standard_planner import StandardLoadPlanner, StandardSavePlanner

__all__ = [
    "CHUNK_INFO",
    "ChunkInfo",
    "ChunkStorageMetadata",
    "FileSystemReader",
    "FileSystemWriter",
    "Metadata",
    "PerRank",
    "RaggedShard",
    "StandardLoadPlanner",
    "StandardSavePlanner",
    "allocate_optimizer_state",
    "config",
    "load",
    "save",
]
