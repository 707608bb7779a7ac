"""A rank whose names do not fit one header writes several files, and all of them are found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import hpdcp
from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._files import safetensors_layout
from hpdcp._format.file_names import LEASE, METADATA


@pytest.fixture(autouse=True)
def tiny_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_layout, "MAX_HEADER_BYTES", 3000)


def state(value: int) -> dict[str, Any]:
    tensors = {f"layer {i} über": torch.full((i % 5, 3), value * i, dtype=torch.int32) for i in range(40)}
    doubles = {f"d{i}": torch.full((2,), float(value * i), dtype=torch.float64) for i in range(20)}
    # A tensor beside them, or all values would be stored as one.
    values = {f"value {i}": [value, i] for i in range(30)}
    return {"t": tensors, "d": doubles, "v": {**values, "n": torch.tensor(value)}}


def split(folder: Path, suffix: str) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(suffix))


def test_many_files_per_rank_come_back_whole(tmp_path: Path) -> None:
    metadata = hpdcp.save(state(3), checkpoint_id=tmp_path)
    assert len(split(tmp_path, ".safetensors")) > 5 and len(split(tmp_path, ".bytes")) > 2
    assert {path.name for path in tmp_path.iterdir()} == {METADATA, LEASE, *metadata.files}
    target = state(-1)
    hpdcp.load(target, checkpoint_id=tmp_path)
    expected = state(3)
    assert [target["v"][f"value {i}"] for i in range(30)] == [[3, i] for i in range(30)]
    for group in ("t", "d"):
        for name, tensor in expected[group].items():
            assert torch.equal(target[group][name], tensor), name
    assert int(target["v"]["n"]) == 3


def test_no_header_is_longer_than_asked_and_each_file_opens_elsewhere(tmp_path: Path) -> None:
    hpdcp.save(state(3), checkpoint_id=tmp_path)
    found = 0
    for name in split(tmp_path, ".safetensors"):
        header = int.from_bytes((tmp_path / name).read_bytes()[:8], "little")
        assert header <= 4096 - 8
        with safe_open(tmp_path / name, framework="pt") as file:
            found += len(file.keys())
    empty = sum(1 for tensor in state(3)["t"].values() if not tensor.numel())
    assert found == 61 - empty


def test_a_save_over_several_files_removes_all_of_the_old_ones(tmp_path: Path) -> None:
    old = hpdcp.save(state(3), checkpoint_id=tmp_path)
    new = hpdcp.save(state(4), checkpoint_id=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {METADATA, LEASE, *new.files}
    assert not set(old.files) & set(new.files)
    target = state(-1)
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert target["v"]["value 7"] == [4, 7]


def test_two_files_of_one_rank_that_change_places_are_told_apart(tmp_path: Path) -> None:
    hpdcp.save({f"t{i:03}": torch.full((8,), float(i)) for i in range(60)}, checkpoint_id=tmp_path)
    names = split(tmp_path, ".safetensors")
    sizes = {(tmp_path / name).stat().st_size: name for name in reversed(names)}
    pairs = [(name, sizes[size]) for name in names if sizes[size := (tmp_path / name).stat().st_size] != name]
    assert pairs, "no two files of one size"
    first, second = (tmp_path / name for name in pairs[0])
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(CorruptCheckpointError, match="does not begin as the file"):
        hpdcp.load({f"t{i:03}": torch.zeros(8) for i in range(60)}, checkpoint_id=tmp_path)


def test_one_name_longer_than_a_header_still_gets_a_file(tmp_path: Path) -> None:
    name = "n" * 20_000
    hpdcp.save({name: torch.ones(2), "other": torch.zeros(2)}, checkpoint_id=tmp_path)
    target = {name: torch.zeros(2), "other": torch.ones(2)}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target[name], torch.ones(2)) and len(split(tmp_path, ".safetensors")) == 2
