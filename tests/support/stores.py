"""What the jobs that run on several stores share: layouts for any number of ranks, and one load to be counted."""

from __future__ import annotations

from typing import Final

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.layouts import PLAIN, Layout, sample_tensors
from tests.support.s3 import S3Server

LOADED_ONCE: Final = "loaded-once"
"""Name of the checkpoint that all ranks load once, and do nothing else with after it is saved."""
LOADED_ONCE_BYTES: Final = 24 << 20
"""Of tensors in it, all of which every rank wants; a rank of four writes more than the least part of an upload."""


def s3_environment(server: S3Server, url: str) -> dict[str, str]:
    """For ranks that test `url`, a place on the server: uploads in parts as small as S3 takes them."""
    return server.environment() | {
        "HPDCP_TEST_STORE_URL": url,
        "HPDCP_TEST_STORE_BROADCASTS": "1",
        "HPDCP_BACKENDS__S3__PART_BYTES": "5MiB",
        "HPDCP_BACKENDS__S3__PUT_BELOW": "5MiB",
    }


def layouts_of(world: int) -> dict[str, Layout]:
    """Ways to lay a tensor over `world` ranks, 2 or any larger even number."""
    pairs = (2, world // 2)
    parts = (1, *[2] * (world - 1))
    return {
        "rows": Layout("rows", (world,), (Shard(0),)),
        "columns": Layout("columns", (world,), (Shard(1),)),
        "replicated": Layout("replicated", (world,), (Replicate(),)),
        "replicated rows": Layout("replicated rows", pairs, (Replicate(), Shard(0))),
        "twice on one dim": Layout("strided", pairs, (_StridedShard(0, split_factor=pairs[1]), Shard(0))),
        "ragged": Layout("ragged", (world,), units=parts),
        "rows by chunk info": Layout("rows by chunk info", units=parts, plain=True),
        "one rank": Layout("one rank", (1,), (Replicate(),), ranks=(world - 1,)),
        "plain": PLAIN,
    }


def tensors_of(scale: float) -> dict[str, torch.Tensor]:
    full = {name: tensor * scale for name, tensor in sample_tensors().items()}
    return full | {"half": (full["even"] / 7).to(torch.bfloat16), "long": full["cube"].to(torch.int64)}
