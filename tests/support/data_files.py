"""Data files of a checkpoint, whose names carry an attempt that a test does not know beforehand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hpdcp._format.file_names import DataFileName


def data_file(folder: Path, rank: int = 0, suffix: str = ".safetensors") -> Path:
    """The only file in the folder that the rank wrote with this suffix."""
    (found,) = folder.glob(f"_rank{rank}_.*{suffix}")
    return found


def without_attempt(keys: Iterable[str]) -> list[str]:
    """The names with nothing in place of the attempt, in the order given."""
    found = [(key, DataFileName.parse(key)) for key in keys]
    return [key if name is None else replace(name, attempt=None).key for key, name in found]
