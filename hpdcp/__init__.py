"""Distributed checkpoints of PyTorch training state: every rank saves its shards, any layout loads them again."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hpdcp import config as config
    from hpdcp import errors as errors
    from hpdcp import offline_transform as offline_transform
    from hpdcp import ragged as ragged
    from hpdcp import utils as utils
    from hpdcp.api import load as load
    from hpdcp.api import save as save
    from hpdcp.async_persist import async_save as async_save
    from hpdcp.async_persist import start_async_worker as start_async_worker
    from hpdcp.async_persist import wait_for_saves as wait_for_saves
    from hpdcp.async_response import AsyncSaveResponse as AsyncSaveResponse
    from hpdcp.data_copier import DataCopier as DataCopier
    from hpdcp.filesystem_storage import FileSystemReader as FileSystemReader
    from hpdcp.filesystem_storage import FileSystemWriter as FileSystemWriter
    from hpdcp.huggingface import HuggingFaceReader as HuggingFaceReader
    from hpdcp.huggingface_names import Part as Part
    from hpdcp.metadata import CHUNK_INFO as CHUNK_INFO
    from hpdcp.metadata import ChunkInfo as ChunkInfo
    from hpdcp.metadata import ChunkStorageMetadata as ChunkStorageMetadata
    from hpdcp.metadata import Metadata as Metadata
    from hpdcp.metadata import PerRank as PerRank
    from hpdcp.optimizer_state import allocate_optimizer_state as allocate_optimizer_state
    from hpdcp.ragged import RaggedShard as RaggedShard
    from hpdcp.standard_planner import StandardLoadPlanner as StandardLoadPlanner
    from hpdcp.standard_planner import StandardSavePlanner as StandardSavePlanner

__version__ = "0.1.0"

_HOMES: Final = {
    "AsyncSaveResponse": "async_response",
    "DataCopier": "data_copier",
    "async_save": "async_persist",
    "start_async_worker": "async_persist",
    "wait_for_saves": "async_persist",
    "CHUNK_INFO": "metadata",
    "ChunkInfo": "metadata",
    "ChunkStorageMetadata": "metadata",
    "FileSystemReader": "filesystem_storage",
    "FileSystemWriter": "filesystem_storage",
    "HuggingFaceReader": "huggingface",
    "Metadata": "metadata",
    "Part": "huggingface_names",
    "PerRank": "metadata",
    "RaggedShard": "ragged",
    "StandardLoadPlanner": "standard_planner",
    "StandardSavePlanner": "standard_planner",
    "allocate_optimizer_state": "optimizer_state",
    "load": "api",
    "save": "api",
}
"""Where each public name lives; imported when it is asked for, since torch takes seconds and a backend needs none."""

_MODULES: Final = ("config", "errors", "offline_transform", "ragged", "utils")
"""Modules that are public as they are."""

__all__ = [
    "AsyncSaveResponse",
    "DataCopier",
    "async_save",
    "start_async_worker",
    "wait_for_saves",
    "CHUNK_INFO",
    "ChunkInfo",
    "ChunkStorageMetadata",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceReader",
    "Metadata",
    "Part",
    "PerRank",
    "RaggedShard",
    "StandardLoadPlanner",
    "StandardSavePlanner",
    "allocate_optimizer_state",
    "config",
    "load",
    "offline_transform",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"hpdcp.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hpdcp' has no attribute {name!r}")
    found = getattr(import_module(f"hpdcp.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:
    # Then there is nothing to spare, and a first save should not pay for imports that belong to the start of a script.
    import_module("hpdcp.api")
