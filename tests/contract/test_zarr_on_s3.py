"""Arrays of zarr in a bucket: saved, loaded, and opened there by zarr-python itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zarr

import hpdcp
from hpdcp._base import config
from hpdcp._base.errors import CheckpointExistsError, CorruptCheckpointError
from hpdcp._files import registry
from hpdcp._manage.verify import verify_checkpoint
from hpdcp._state.geometry import Box
from hpdcp.testing._layout.ranks import save_as_ranks
from hpdcp.testing._layout.states import cut
from hpdcp_backends._zarr import grid
from tests.support.s3 import S3Server


def state(fill: float) -> dict[str, Any]:
    whole = torch.arange(1200.0).reshape(30, 40) + fill
    return {"model": {"w": whole, "half": whole.bfloat16()}, "step": fill}


@pytest.mark.parametrize("options", [{}, {"compressor": "zstd"}], ids=["plain", "compressed"])
def test_a_bucket_holds_arrays_that_load_and_that_zarr_opens(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    monkeypatch.setattr(grid, "SMALL_BYTES", 500)
    url = s3_environment.new_prefix()
    with config.using(layout="zarr", layouts={"zarr": options}):
        hpdcp.save(state(1.0), checkpoint_id=url)
        with pytest.raises(CheckpointExistsError):
            hpdcp.save(state(2.0), checkpoint_id=url)
    target = state(0.0)
    hpdcp.load(target, checkpoint_id=url)
    assert torch.equal(target["model"]["w"], state(1.0)["model"]["w"])
    assert torch.equal(target["model"]["half"], state(1.0)["model"]["half"])
    assert target["step"] == 1.0
    part = {"model": {"w": cut(torch.zeros(30, 40), Box((3, 5), (20, 30)))}}
    hpdcp.load(part, checkpoint_id=url)
    assert torch.equal(part["model"]["w"], state(1.0)["model"]["w"][3:23, 5:35])
    group: Any = zarr.open_group(url, mode="r", storage_options=s3_environment.storage_options())
    assert np.array_equal(group["model"]["w"][...], state(1.0)["model"]["w"].numpy())
    assert verify_checkpoint(url).is_sound


def test_ranks_redistribute_through_the_bucket_and_leave_nothing_of_it(s3_environment: S3Server) -> None:
    url = s3_environment.new_prefix()
    whole = torch.arange(60.0).reshape(6, 10)
    boxes = [Box((0, 0), (1, 10)), Box((1, 0), (5, 4)), Box((1, 4), (5, 6))]
    with config.using(layout="zarr"):
        metadata = save_as_ranks(url, [{"w": cut(whole, box)} for box in boxes])
    target = {"w": torch.zeros(6, 10)}
    hpdcp.load(target, checkpoint_id=url)
    assert torch.equal(target["w"], whole)
    with registry.open_backend(url) as backend:
        there = {info.key for info in backend.list_keys(recursive=True)}
    assert there == {*metadata.files, ".metadata", ".attempt"}


def test_a_chunk_that_is_lost_or_damaged_in_the_bucket_is_an_error_and_not_zeros(s3_environment: S3Server) -> None:
    url = s3_environment.new_prefix()
    with config.using(layout="zarr"):
        hpdcp.save(state(1.0), checkpoint_id=url)
    with registry.open_backend(url) as backend:
        data = bytearray(backend.read("model/w/c/0/0"))
        data[4500] ^= 1
        backend.write("model/w/c/0/0", [memoryview(bytes(data))], size=len(data), exclusive=False)
        with pytest.raises(CorruptCheckpointError, match="model/w/c/0/0"):
            hpdcp.load(state(0.0), checkpoint_id=url)
        backend.delete(["model/w/c/0/0"])
    with pytest.raises(CorruptCheckpointError, match="model/w/c/0/0"):
        hpdcp.load(state(0.0), checkpoint_id=url)
