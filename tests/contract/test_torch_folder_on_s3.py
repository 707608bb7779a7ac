"""A checkpoint of torch.distributed.checkpoint in a bucket: the same reader, over a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp.errors import CorruptCheckpointError
from hpdcp.offline_transform import convert_full_checkpoint_to_dcp
from hpdcp.registry import open_backend
from hpdcp.verify import verify_checkpoint
from tests.support.pickled import Save
from tests.support.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TENSORS = {f"layers.{n}.w": torch.arange(64.0 * (300 + n)).reshape(64, -1) for n in range(20)}


@pytest.fixture
def bucket(s3_environment: S3Server, tmp_path: Path) -> str:
    """What torch saved, in a bucket."""
    Save.make(tmp_path / "theirs", **TENSORS)
    url = s3_environment.new_prefix()
    with open_backend(url) as backend:
        for path in (tmp_path / "theirs").iterdir():
            data = path.read_bytes()
            backend.write(path.name, [memoryview(data)], size=len(data), exclusive=False)
    return url


def blanks() -> dict[str, Any]:
    return {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}


def test_it_loads_verifies_and_converts_where_it_lies(bucket: str, tmp_path: Path) -> None:
    target = blanks()
    hpdcp.load(target, checkpoint_id=bucket)
    assert all(torch.equal(target[name], tensor) for name, tensor in TENSORS.items())
    assert verify_checkpoint(bucket).is_sound
    convert_full_checkpoint_to_dcp(bucket, tmp_path / "ours", src_platform="torch")
    target = blanks()
    hpdcp.load(target, checkpoint_id=tmp_path / "ours")
    assert all(torch.equal(target[name], tensor) for name, tensor in TENSORS.items())


def test_rows_of_it_load(bucket: str) -> None:
    name, whole = next(iter(TENSORS.items()))
    part = torch.zeros(8, whole.shape[1])
    setattr(part, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(hpdcp.ChunkStorageMetadata((16, 0), (8, 300)), (64, 300)))
    hpdcp.load({name: part}, checkpoint_id=bucket)
    assert torch.equal(part, whole[16:24])


def test_a_file_that_was_cut_off_is_named(bucket: str) -> None:
    with open_backend(bucket) as backend:
        data = backend.read("__0_0.distcp")[:-1]
        backend.write("__0_0.distcp", [memoryview(data)], size=len(data), exclusive=False)
    with pytest.raises(CorruptCheckpointError, match=r"'__0_0\.distcp', which has"):
        hpdcp.load(blanks(), checkpoint_id=bucket)
