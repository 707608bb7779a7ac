"""Two names for one memory: what was stored under them must be the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpdcp
from hpdcp._base.errors import LoadMismatchError
from tests.support.huggingface import write_single


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def stored(*, differ: bool, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    embed = torch.arange(24.0).reshape(6, 4)
    head = embed.clone()
    head[5, 3] += differ
    return {"embed.weight": embed, "head.weight": head.to(dtype)}


@pytest.mark.parametrize("layout", ["safetensors", "zarr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_differs_is_refused_naming_both(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    with hpdcp.config.using(layout=layout):
        hpdcp.save({"model": stored(differ=True, dtype=dtype)}, checkpoint_id=tmp_path)
    with pytest.raises(LoadMismatchError, match=r"'model\.head\.weight' \(the same memory as 'model\.embed\.weight'\)"):
        _load({"model": Tied()}, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_equal_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    hpdcp.save({"model": stored(differ=False, dtype=dtype)}, checkpoint_id=tmp_path)
    model = Tied()
    _load({"model": model}, tmp_path)
    assert torch.equal(model.head.weight, torch.arange(24.0).reshape(6, 4))
    assert model.head.weight is model.embed.weight


def test_nothing_is_changed_where_the_checksums_tell(tmp_path: Path) -> None:
    hpdcp.save(stored(differ=True), checkpoint_id=tmp_path)
    one = torch.full((6, 4), -1.0)
    with pytest.raises(LoadMismatchError):
        hpdcp.load({"embed.weight": one, "head.weight": one}, checkpoint_id=tmp_path)
    assert torch.equal(one, torch.full((6, 4), -1.0))
    hpdcp.load({"head.weight": one}, checkpoint_id=tmp_path)
    assert float(one[5, 3]) == 24.0


@pytest.mark.parametrize("differ", [True, False])
def test_a_folder_of_hugging_face_is_read_to_tell(tmp_path: Path, differ: bool) -> None:
    write_single(tmp_path, stored(differ=differ))
    one = torch.zeros(6, 4)
    target = {"embed.weight": one, "head.weight": one}
    if differ:
        with pytest.raises(LoadMismatchError, match=r"'head\.weight' \(the same memory as 'embed\.weight'\)"):
            hpdcp.load(target, storage_reader=hpdcp.HuggingFaceReader(tmp_path))
    else:
        hpdcp.load(target, storage_reader=hpdcp.HuggingFaceReader(tmp_path))
        assert torch.equal(one, torch.arange(24.0).reshape(6, 4))


def _load(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hpdcp.load(state, checkpoint_id=folder)
