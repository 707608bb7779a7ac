"""A Hugging Face folder in a bucket: the same reader, over a network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp import HuggingFaceReader
from hpdcp._base.errors import CorruptCheckpointError, IncompleteCheckpointError
from hpdcp._files.registry import open_backend
from hpdcp._manage.inspect import inspect_checkpoint
from tests.support.huggingface import blanks, same, shard_name, write_shards
from tests.support.s3 import S3Server


@pytest.fixture
def bucket(s3_environment: S3Server, tmp_path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """A folder of four shards in a bucket, and what it holds."""
    tensors = {f"layers.{n}.w": torch.randn(64, 300 + n).to(torch.bfloat16) for n in range(20)}
    write_shards(tmp_path, tensors, shards=4)
    url = s3_environment.new_prefix()
    with open_backend(url) as backend:
        for path in tmp_path.iterdir():
            data = path.read_bytes()
            backend.write(path.name, [memoryview(data)], size=len(data), exclusive=False)
    return url, tensors


def test_weights_load_from_a_bucket_bit_for_bit(bucket: tuple[str, dict[str, torch.Tensor]]) -> None:
    url, tensors = bucket
    targets = blanks(tensors)
    hpdcp.load(targets, checkpoint_id=url)
    assert [key for key in tensors if not same(tensors[key], targets[key])] == []
    nested = {"net": blanks(tensors)}
    hpdcp.load(nested, storage_reader=HuggingFaceReader(url, prefix="net."))
    assert [key for key in tensors if not same(tensors[key], nested["net"][key])] == []
    assert len(inspect_checkpoint(url).tensors) == len(tensors)


def test_a_shard_that_is_missing_or_cut_off_in_the_bucket_is_named(
    bucket: tuple[str, dict[str, torch.Tensor]],
) -> None:
    url, tensors = bucket
    targets = blanks(tensors)
    with open_backend(url) as backend:
        whole = backend.read(shard_name(2, 4))
        backend.write(shard_name(2, 4), [memoryview(whole)[:-5]], size=len(whole) - 5, exclusive=False)
        with pytest.raises(CorruptCheckpointError, match=shard_name(2, 4)):
            hpdcp.load(targets, checkpoint_id=url)
        backend.delete([shard_name(2, 4)])
        with pytest.raises(IncompleteCheckpointError, match=shard_name(2, 4)):
            hpdcp.load(targets, checkpoint_id=url)
    assert not any(same(tensors[key], targets[key]) for key in tensors)
