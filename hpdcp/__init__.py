"""Distributed checkpoints of PyTorch training state: every rank saves its shards, any layout loads them again."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hpdcp import config as config
    from hpdcp import errors as errors
    from hpdcp import keep as keep
    from hpdcp import offline_transform as offline_transform
    from hpdcp import ragged as ragged
    from hpdcp import utils as utils
    from hpdcp._background.async_save import async_save as async_save
    from hpdcp._background.async_save import start_async_worker as start_async_worker
    from hpdcp._background.async_save import wait_for_saves as wait_for_saves
    from hpdcp._background.data_copier import DataCopier as DataCopier
    from hpdcp._background.response import AsyncSaveResponse as AsyncSaveResponse
    from hpdcp._engine.from_pretrained import from_pretrained as from_pretrained
    from hpdcp._engine.optimizer_state import allocate_optimizer_state as allocate_optimizer_state
    from hpdcp._engine.verbs import load as load
    from hpdcp._engine.verbs import save as save
    from hpdcp._files.huggingface_names import Part as Part
    from hpdcp._files.huggingface_names import TensorPart as TensorPart
    from hpdcp._files.huggingface_reader import HuggingFaceReader as HuggingFaceReader
    from hpdcp._files.reader import FileSystemReader as FileSystemReader
    from hpdcp._files.writer import FileSystemWriter as FileSystemWriter
    from hpdcp._format.metadata import CHUNK_INFO as CHUNK_INFO
    from hpdcp._format.metadata import ChunkInfo as ChunkInfo
    from hpdcp._format.metadata import ChunkStorageMetadata as ChunkStorageMetadata
    from hpdcp._format.metadata import Metadata as Metadata
    from hpdcp._format.metadata import PerRank as PerRank
    from hpdcp._manage.run import Checkpoints as Checkpoints
    from hpdcp._plan.standard_load_planner import StandardLoadPlanner as StandardLoadPlanner
    from hpdcp._plan.standard_save_planner import StandardSavePlanner as StandardSavePlanner
    from hpdcp._state.ragged import RaggedShard as RaggedShard

__version__ = "0.1.0"

_HOMES: Final = {
    "AsyncSaveResponse": "_background.response",
    "DataCopier": "_background.data_copier",
    "async_save": "_background.async_save",
    "start_async_worker": "_background.async_save",
    "wait_for_saves": "_background.async_save",
    "CHUNK_INFO": "_format.metadata",
    "ChunkInfo": "_format.metadata",
    "ChunkStorageMetadata": "_format.metadata",
    "Checkpoints": "_manage.run",
    "FileSystemReader": "_files.reader",
    "FileSystemWriter": "_files.writer",
    "HuggingFaceReader": "_files.huggingface_reader",
    "Metadata": "_format.metadata",
    "Part": "_files.huggingface_names",
    "PerRank": "_format.metadata",
    "RaggedShard": "_state.ragged",
    "StandardLoadPlanner": "_plan.standard_load_planner",
    "StandardSavePlanner": "_plan.standard_save_planner",
    "TensorPart": "_files.huggingface_names",
    "allocate_optimizer_state": "_engine.optimizer_state",
    "from_pretrained": "_engine.from_pretrained",
    "load": "_engine.verbs",
    "save": "_engine.verbs",
}
"""Where each public name lives; imported when it is asked for, since torch takes seconds and a backend needs none."""

_MODULES: Final = ("config", "errors", "keep", "offline_transform", "ragged", "utils")
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
    "Checkpoints",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceReader",
    "Metadata",
    "Part",
    "PerRank",
    "RaggedShard",
    "StandardLoadPlanner",
    "StandardSavePlanner",
    "TensorPart",
    "allocate_optimizer_state",
    "config",
    "from_pretrained",
    "keep",
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
    import_module("hpdcp._engine.verbs")
