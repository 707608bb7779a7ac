"""Conversions and comparisons from and to the zarr layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hpdcp
from hpdcp import PerRank
from hpdcp._base import config
from hpdcp._manage.verify import verify_checkpoint
from hpdcp._state.geometry import Box
from hpdcp.offline_transform import (
    convert_dcp_to_dcp,
    convert_dcp_to_huggingface,
    convert_dcp_to_torch,
    convert_full_checkpoint_to_dcp,
    dcp_to_full_state_dict,
)
from hpdcp.testing._layout.ranks import save_as_ranks
from hpdcp.testing._layout.states import cut
from hpdcp_backends._zarr import grid


@pytest.fixture(params=[{}, {"compressor": "zstd"}], ids=["plain", "compressed"], autouse=True)
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, object]:
    """Chunks that are small, and cut off at the ends of the tensors."""
    monkeypatch.setattr(grid, "SMALL_BYTES", 64)
    monkeypatch.setattr(grid, "LARGE_BYTES", 200)
    found: Mapping[str, object] = request.param
    return found


def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(91.0).reshape(7, 13), "b": torch.arange(30).reshape(5, 6).bfloat16(), "c": torch.ones(3)}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_of_arrays_becomes_a_hugging_face_folder(tmp_path: Path, options: Mapping[str, object]) -> None:
    with config.using(layout="zarr", layouts={"zarr": options}):
        hpdcp.save(weights(), checkpoint_id=tmp_path / "zarr")
    convert_dcp_to_huggingface(tmp_path / "zarr", tmp_path / "hf")
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), weights())


def test_a_checkpoint_of_arrays_becomes_a_file_of_torch_and_a_state_dict(
    tmp_path: Path, options: Mapping[str, object]
) -> None:
    with config.using(layout="zarr", layouts={"zarr": options}):
        hpdcp.save({"model": weights(), "step": 3}, checkpoint_id=tmp_path / "zarr")
    convert_dcp_to_torch(tmp_path / "zarr", tmp_path / "all.pt")
    for found in (torch.load(tmp_path / "all.pt"), dcp_to_full_state_dict(tmp_path / "zarr")):
        assert same(found["model"], weights())
        assert found["step"] == 3


def test_a_hugging_face_folder_becomes_a_checkpoint_of_arrays(tmp_path: Path, options: Mapping[str, object]) -> None:
    (tmp_path / "hf").mkdir()
    save_file(weights(), tmp_path / "hf" / "model.safetensors")
    with config.using(layout="zarr", layouts={"zarr": options}):
        convert_full_checkpoint_to_dcp(tmp_path / "hf", tmp_path / "zarr")
    target = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    hpdcp.load(target, checkpoint_id=tmp_path / "zarr")
    assert same(target, weights())
    assert (tmp_path / "zarr" / "a" / "zarr.json").exists()
    assert verify_checkpoint(tmp_path / "zarr").is_sound


def test_a_checkpoint_is_written_again_in_each_layout_and_loads_as_before(
    tmp_path: Path, options: Mapping[str, object]
) -> None:
    tied = torch.arange(20.0)
    boxes = [Box((0, 0), (3, 13)), Box((3, 0), (4, 13))]
    states: list[dict[str, object]] = [
        {
            "a": cut(weights()["a"], box),
            "tied": {"one": tied, "two": tied},
            "none": torch.zeros(0, 2),
            "step": {"count": 3, "names": ("x", b"y")},
            "mine": PerRank({"seed": torch.tensor([rank]), "place": rank * 10}),
        }
        for rank, box in enumerate(boxes)
    ]
    save_as_ranks(str(tmp_path / "first"), states)
    convert_dcp_to_dcp(tmp_path / "first", tmp_path / "dry", layout="zarr", dry_run=True)
    assert not (tmp_path / "dry").exists()
    with config.using(layouts={"zarr": options}):
        done = convert_dcp_to_dcp(tmp_path / "first", tmp_path / "second", layout="zarr")
    assert "a/zarr.json" in done.files
    convert_dcp_to_dcp(tmp_path / "second", tmp_path / "third", layout="safetensors")
    for place in ("second", "third"):
        twin = torch.zeros(20)
        target: dict[str, object] = {
            "a": torch.zeros(7, 13),
            "tied": {"one": twin, "two": twin},
            "none": torch.zeros(0, 2),
            "step": {"count": 0, "names": ()},
            "mine": PerRank.all(),
        }
        hpdcp.load(target, checkpoint_id=tmp_path / place)
        assert torch.equal(target["a"], weights()["a"])  # type: ignore[arg-type]
        assert torch.equal(twin, tied)
        assert target["step"] == {"count": 3, "names": ("x", b"y")}
        every = target["mine"].value  # type: ignore[attr-defined]
        assert [int(mine["seed"]) for mine in every] == [0, 1]
        assert [mine["place"] for mine in every] == [0, 10]
        assert verify_checkpoint(tmp_path / place).is_sound
