"""Folders that ranks saved with torch's HuggingFaceStorageWriter: files of parts of tensors, without an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import hpdcp
from hpdcp import HuggingFaceReader, TensorPart
from hpdcp._base.errors import CorruptCheckpointError, CoverageError
from hpdcp.offline_transform import convert_full_checkpoint_to_dcp
from tests.support.huggingface import blanks, same

Parts = Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]


def write_rank(folder: Path, rank: int, parts: Parts) -> Path:
    """What torch writes for one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    info = {key: {"saved_offsets": offsets} for key, (_, offsets) in parts.items()}
    path = folder / f"shard-{rank:05}-model-00001-of-00001.safetensors"
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"}
    save_file({key: tensor.contiguous() for key, (tensor, _) in parts.items()}, path, metadata=metadata)
    return path


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(6, 4), "b": torch.randn(5), "scalar": torch.tensor(2.5)}


def write_all(folder: Path, whole: Mapping[str, torch.Tensor]) -> None:
    write_rank(folder, 0, {"w": (whole["w"][:3, :2], (0, 0)), "b": (whole["b"], (0,)), "scalar": (whole["scalar"], ())})
    write_rank(folder, 1, {"w": (whole["w"][3:], (3, 0)), "b": (whole["b"], (0,))})
    write_rank(folder, 2, {"w": (whole["w"][:3, 2:], (0, 2))})


def test_parts_of_all_ranks_are_read_as_whole_tensors(tmp_path: Path) -> None:
    whole = tensors()
    write_all(tmp_path / "ranks", whole)
    targets = blanks(whole)
    hpdcp.load(targets, checkpoint_id=tmp_path / "ranks")
    assert all(same(whole[key], targets[key]) for key in whole)
    convert_full_checkpoint_to_dcp(tmp_path / "ranks", tmp_path / "checkpoint")
    targets = blanks(whole)
    hpdcp.load(targets, checkpoint_id=tmp_path / "checkpoint")
    assert all(same(whole[key], targets[key]) for key in whole)


def test_parts_may_be_renamed_and_be_parts_of_larger_ones(tmp_path: Path) -> None:
    whole = tensors()
    write_all(tmp_path, whole)
    target = torch.zeros(2, 6, 4)
    reader = HuggingFaceReader(tmp_path, name_map={"w": TensorPart("stacked", (1, 0, 0))})
    with pytest.raises(CoverageError):
        hpdcp.load({"stacked": target}, storage_reader=reader)
    target = torch.zeros(1, 6, 4)
    reader = HuggingFaceReader(tmp_path, name_map={"w": TensorPart("stacked", (0, 0, 0)), "b": "bias"})
    bias = torch.zeros(5)
    hpdcp.load({"stacked": target, "bias": bias}, storage_reader=reader)
    assert torch.equal(target[0], whole["w"])
    assert torch.equal(bias, whole["b"])


@pytest.mark.filterwarnings("ignore")  # torch's own, of a save by one process
def test_what_torch_itself_writes_is_read(tmp_path: Path) -> None:
    whole = tensors()
    writer = HuggingFaceStorageWriter(path=str(tmp_path / "ranks"), save_distributed=True)
    dcp.save(dict(whole), storage_writer=writer, no_dist=True)
    targets = blanks(whole)
    hpdcp.load(targets, checkpoint_id=tmp_path / "ranks")
    assert all(same(whole[key], targets[key]) for key in whole)


def test_a_rank_s_file_that_is_missing_is_a_hole(tmp_path: Path) -> None:
    whole = tensors()
    write_all(tmp_path, whole)
    (tmp_path / "shard-00000-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CoverageError, match="'w'"):
        hpdcp.load({"w": torch.zeros(6, 4)}, checkpoint_id=tmp_path)


@pytest.mark.parametrize(
    "told", ["{", "[]", "{}", '{"w": 3}', '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [0, -1]}}']
)
def test_a_table_that_says_nothing_of_a_tensor_is_named(tmp_path: Path, told: str) -> None:
    path = tmp_path / "shard-00000-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2, 2)}, path, metadata={"DCP_SHARDING_INFO": told})
    with pytest.raises(CorruptCheckpointError, match="DCP_SHARDING_INFO"):
        hpdcp.load({"w": torch.zeros(2, 2)}, checkpoint_id=tmp_path)
