"""Quantised weights, in every direction: codes are moved with their scales, and never cast without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import HuggingFaceReader, StandardLoadPlanner, TensorPart
from hpdcp._base.errors import DtypeMismatchError, InvalidArgumentError, UnsupportedTypeError
from hpdcp.offline_transform import convert_dcp_to_huggingface, convert_full_checkpoint_to_dcp
from tests.support.huggingface import blanks, same, write_shards, write_single

FLOAT8 = torch.float8_e4m3fn

STYLES = {
    "DeepSeek": ("a.weight", "a.weight_scale_inv", FLOAT8),
    "compressed-tensors": ("a.weight", "a.weight_scale", torch.int8),
    "DeepSeek's own": ("a.weight", "a.scale", FLOAT8),
    "gpt-oss": ("experts.up_proj_blocks", "experts.up_proj_scales", torch.uint8),
    "ComfyUI": ("a.weight", "a.scale_weight", torch.float8_e5m2),
    "MLX": ("a.weight", "a.scales", torch.uint32),
    "bitsandbytes": ("a.weight", "a.SCB", torch.int8),
}


def quantised(name: str = "a.weight", scale: str = "a.weight_scale_inv", dtype: torch.dtype = FLOAT8) -> dict[str, Any]:
    return {
        name: torch.arange(16).reshape(4, 4).to(dtype),
        scale: torch.full((1, 1), 4.0),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }


def as_stored(folder: Path) -> Path:
    return folder


def as_checkpoint(folder: Path) -> Path:
    convert_full_checkpoint_to_dcp(folder, folder.parent / "checkpoint")
    return folder.parent / "checkpoint"


@pytest.mark.parametrize("source", [as_stored, as_checkpoint])
@pytest.mark.parametrize("style", STYLES)
def test_codes_are_loaded_as_they_are_and_never_cast(
    tmp_path: Path, style: str, source: Callable[[Path], Path]
) -> None:
    tensors = quantised(*STYLES[style])
    code, scale, _ = STYLES[style]
    folder = source(write_single(tmp_path / "folder", tensors))
    targets = blanks(tensors)
    hpdcp.load(targets, checkpoint_id=folder)
    assert all(same(tensors[key], targets[key]) for key in tensors)
    wide = {code: torch.zeros(4, 4, dtype=torch.bfloat16)}
    with pytest.raises(DtypeMismatchError, match=f"(?s){code}.*scaled by '{scale}'.*multiplied by their scales"):
        hpdcp.load(wide, checkpoint_id=folder)
    assert not wide[code].any()


def test_codes_in_shards_apart_from_their_scales_are_known_as_codes(tmp_path: Path) -> None:
    write_shards(tmp_path, quantised(), shards=3)
    with pytest.raises(DtypeMismatchError, match=r"a\.weight_scale_inv"):
        hpdcp.load({"a.weight": torch.zeros(4, 4)}, checkpoint_id=tmp_path)


def test_values_of_any_dtype_without_a_scale_are_cast_as_ever(tmp_path: Path) -> None:
    write_single(tmp_path, {"w": torch.ones(4).to(FLOAT8), "gamma": torch.ones(4), "gamma_scale": torch.ones(4)})
    targets = {"w": torch.zeros(4), "gamma": torch.zeros(4, dtype=torch.bfloat16)}
    with pytest.warns(UserWarning, match="cast"):
        hpdcp.load(targets, checkpoint_id=tmp_path)
    assert targets["w"].tolist() == [1.0] * 4


def test_values_are_not_cast_into_a_target_of_codes(tmp_path: Path) -> None:
    write_single(tmp_path, {"a.weight": torch.full((4, 4), 300.0)})
    targets = quantised()
    with pytest.raises(DtypeMismatchError, match=r"a\.weight_scale_inv"):
        hpdcp.load(
            {key: targets[key] for key in ("a.weight", "a.weight_scale_inv")},
            checkpoint_id=tmp_path,
            planner=StandardLoadPlanner(allow_partial_load=True),
        )


@pytest.mark.parametrize(
    ("name", "shape", "name_map"),
    [
        ("a.weight", (4, 4), lambda key: None if key.endswith("_scale_inv") else key),
        ("a.weight", (4, 4), lambda key: "elsewhere" if key.endswith("_scale_inv") else key),
        ("all", (1, 4, 4), lambda key: TensorPart("all", (0, 0, 0)) if key == "a.weight" else key),
    ],
)
def test_names_that_part_codes_from_scales_hide_nothing(
    tmp_path: Path, name: str, shape: tuple[int, ...], name_map: Callable[[str], Any]
) -> None:
    write_single(tmp_path / "folder", quantised())
    reader = HuggingFaceReader(tmp_path / "folder", name_map=name_map, prefix="model.")
    with pytest.raises(DtypeMismatchError, match=r"a\.weight_scale_inv"):
        hpdcp.load({"model": {name: torch.zeros(shape)}}, storage_reader=reader)
    with pytest.raises(InvalidArgumentError, match=r"a\.weight_scale_inv"):
        convert_full_checkpoint_to_dcp(tmp_path / "folder", tmp_path / "checkpoint", name_map=name_map)
    assert not (tmp_path / "checkpoint").exists()


def test_an_export_keeps_codes_beside_their_scales_or_refuses(tmp_path: Path) -> None:
    tensors = quantised()
    hpdcp.save(tensors, checkpoint_id=tmp_path / "checkpoint")
    with pytest.raises(UnsupportedTypeError, match=r"a\.weight_scale_inv"):
        convert_dcp_to_huggingface(tmp_path / "checkpoint", tmp_path / "out", dtype="bfloat16")
    with pytest.raises(InvalidArgumentError, match=r"a\.weight_scale_inv"):
        convert_dcp_to_huggingface(tmp_path / "checkpoint", tmp_path / "out", exclude=["*_scale_inv"])
    assert not (tmp_path / "out").exists()
    convert_dcp_to_huggingface(tmp_path / "checkpoint", tmp_path / "out")
    targets = blanks(tensors)
    hpdcp.load(targets, checkpoint_id=tmp_path / "out")
    assert all(same(tensors[key], targets[key]) for key in tensors)
    convert_dcp_to_huggingface(tmp_path / "checkpoint", tmp_path / "norms", include=["norm*"], dtype="float32")
