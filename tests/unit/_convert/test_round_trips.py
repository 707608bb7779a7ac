"""Hugging Face → checkpoint → Hugging Face: every dtype, every shape, every name comes back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import hpdcp
from hpdcp import offline_transform
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._format.dtypes import TORCH_NAMES
from tests.support.huggingface import INDEX, blanks, same, write_shards, write_single

DTYPES = [getattr(torch, name) for name in TORCH_NAMES.values()] + [torch.float4_e2m1fn_x2]


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of any bit patterns: NaNs with payloads, infinities, denormals."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def all_kinds() -> dict[str, torch.Tensor]:
    """Tensors of every dtype, 0-dim, empty and odd ones, under names that try readers."""
    tensors = {f"dtypes.{str(dtype).removeprefix('torch.')}": bits(dtype, (3, 4), i) for i, dtype in enumerate(DTYPES)}
    return tensors | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7, dtype=torch.bfloat16),
        "empty.too": torch.empty(2, 0, dtype=torch.int16),
        "слой.重み.🙂": bits(torch.float32, (5,)),
        "with/slash and space": bits(torch.int8, (3,)),
        "a..b.": bits(torch.float16, (1, 1, 3)),
        '"quoted"\\': bits(torch.int64, (2,)),
    }


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by safetensors' own reader and the index as a loader follows it."""
    if (folder / INDEX).exists():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    else:
        with safe_open(folder / "model.safetensors", "pt") as file:
            weight_map = dict.fromkeys(file.keys(), "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(weight_map.values())):
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == {key for key, where in weight_map.items() if where == name}
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no dict
    return found


def differing(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    return sorted(expected.keys() ^ found.keys()) + [
        name for name in expected.keys() & found.keys() if not same(expected[name], found[name])
    ]


@pytest.mark.parametrize("shards", [1, 3])
def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path, shards: int) -> None:
    tensors = all_kinds()
    if shards == 1:
        write_single(tmp_path / "hf", tensors)
    else:
        write_shards(tmp_path / "hf", tensors, shards=shards)
    made = offline_transform.convert_full_checkpoint_to_dcp(tmp_path / "hf", tmp_path / "dcp")
    assert dict(made.tensors) == {name: tensor.nbytes for name, tensor in tensors.items()}
    loaded = blanks(tensors)
    hpdcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert differing(tensors, loaded) == []
    back = offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "back", max_shard_size=100)
    assert back.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert differing(tensors, read_folder(tmp_path / "back")) == []
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "back").iterdir()}
    assert sizes == dict(back.files)
    assert len(sizes) > 3


def test_a_model_is_loaded_from_the_converted_checkpoint_by_its_own_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    write_single(tmp_path / "hf", model.state_dict())
    offline_transform.convert_full_checkpoint_to_dcp(tmp_path / "hf", tmp_path / "dcp")
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    hpdcp.load(other.state_dict(), checkpoint_id=tmp_path / "dcp")
    assert differing(model.state_dict(), other.state_dict()) == []


def test_names_are_nested_and_mapped_on_the_way_in(tmp_path: Path) -> None:
    write_single(tmp_path / "hf", {"a": torch.ones(2), "b": torch.zeros(3)})
    offline_transform.convert_full_checkpoint_to_dcp(
        tmp_path / "hf", tmp_path / "dcp", prefix="model.", name_map={"a": "x.y"}
    )
    state = {"model": {"x.y": torch.zeros(2), "b": torch.ones(3)}}
    hpdcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert state["model"]["x.y"].tolist() == [1, 1]
    assert offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")["model"].keys() == {"b", "x.y"}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_is_parsed_into_a_dict_and_written_from_one(tmp_path: Path, shards: int) -> None:
    tensors = all_kinds()
    write_shards(tmp_path / "hf", tensors, shards=shards)
    parsed = offline_transform.parse_checkpoint_from_huggingface(tmp_path / "hf")
    assert differing(tensors, parsed) == []
    offline_transform.save_state_dict_as_huggingface_format(tmp_path / "back", parsed)
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["model.safetensors"]
    assert differing(tensors, read_folder(tmp_path / "back")) == []


def test_a_state_dict_becomes_a_checkpoint_and_comes_back_with_its_nesting(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    state = {
        "model": {"w": shared, "tied": shared, "none": torch.empty(0, 3)},
        "steps": (torch.tensor(7), [torch.ones(1), {"deep": torch.zeros(2)}]),
        3: {"lr": 0.1, "names": ["a", "b"]},
    }
    offline_transform.full_state_dict_to_dcp_format(state, tmp_path / "dcp")
    found = offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")
    assert found.keys() == {"model", "steps", 3}
    assert found["model"]["w"] is found["model"]["tied"]
    assert torch.equal(found["model"]["w"], shared)
    assert found["model"]["none"].shape == (0, 3)
    assert isinstance(found["steps"], tuple)
    assert found["steps"][0].item() == 7
    assert found["steps"][1][1]["deep"].tolist() == [0, 0]
    assert found[3] == {"lr": 0.1, "names": ["a", "b"]}


def test_names_that_match_are_read_alone(tmp_path: Path) -> None:
    w = torch.ones(3)
    hpdcp.save(
        {"model": {"w": w, "tied": w}, "step": 4, "optimizer": {"lr": 0.1, "m": torch.ones(2)}}, checkpoint_id=tmp_path
    )
    found = offline_transform.dcp_to_full_state_dict(tmp_path, include=["optimizer.*", "step", "model.w"])
    assert found.keys() == {"model", "step", "optimizer"}
    assert found["model"].keys() == {"w"}
    assert found["model"]["w"].tolist() == [1, 1, 1]
    assert found["optimizer"]["lr"] == 0.1
    with pytest.raises(InvalidArgumentError, match=r"'optim\.\*' of include"):
        offline_transform.dcp_to_full_state_dict(tmp_path, include=["optim.*"])
