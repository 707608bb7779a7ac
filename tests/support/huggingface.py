"""Folders of Hugging Face weights for tests: sound ones by safetensors' own writer, others byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"


def write_single(folder: Path, tensors: Mapping[str, torch.Tensor], *, name: str = "model.safetensors") -> Path:
    """`tensors` in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / name, metadata={"format": "pt"})
    return folder


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], *, shards: int) -> Path:
    """`tensors` dealt out to `shards` files, with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = shard_name(shard, shards)
        save_file({key: tensors[key] for key in keys[shard::shards]}, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys[shard::shards], name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_index(folder, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return folder


def shard_name(shard: int, shards: int) -> str:
    """What transformers calls shard number `shard`, counted from 0."""
    return f"model-{shard + 1:05}-of-{shards:05}.safetensors"


def write_index(folder: Path, index: object) -> None:
    """The index; text and bytes as they are, all else as JSON."""
    data = (
        index.encode() if isinstance(index, str) else index if isinstance(index, bytes) else json.dumps(index).encode()
    )
    (folder / INDEX).write_bytes(data)


def read_index(folder: Path) -> dict[str, Any]:
    """The index as it is now."""
    found: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return found


def write_raw(path: Path, header: Mapping[str, object], data: bytes = b"") -> None:
    """A safetensors file whose header says what it likes."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def blanks(tensors: Mapping[str, torch.Tensor], *, prefix: str = "") -> dict[str, torch.Tensor]:
    """Targets for all of them, that hold something else."""
    # Bytes, since not every dtype can be filled with a number.
    return {prefix + key: _inverted(tensor) for key, tensor in tensors.items()}


def _inverted(tensor: torch.Tensor) -> torch.Tensor:
    blank = tensor.clone()
    if blank.numel():
        blank.reshape(-1).view(torch.uint8).bitwise_xor_(1)
    return blank


def same(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return False
    return torch.equal(
        expected.contiguous().reshape(-1).view(torch.uint8), found.contiguous().reshape(-1).view(torch.uint8)
    )
