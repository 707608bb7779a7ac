"""Checkpoints that earlier versions wrote still load, in full and by any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpdcp
from hpdcp._format.file_names import METADATA
from hpdcp._format.metadata import Metadata, PerRankStorageMetadata, TensorStorageMetadata
from tests.golden import values

HERE = Path(__file__).parent
VERSIONS = {"version_1": "1.0", "version_1_1": "1.1", "version_1_2": "1.2", "version_1_3": "1.3"}
"""Folders, and the format that each holds: `together` is all of `make_golden.state`, saved by two ranks as one, and
`apart` the model and the ranks' own state, saved by two ranks without collectives."""


@pytest.fixture(params=VERSIONS)
def together(request: pytest.FixtureRequest) -> Path:
    return HERE / str(request.param) / "together"


@pytest.fixture(params=[f"{version}/{kind}" for version in VERSIONS for kind in ("together", "apart")])
def folder(request: pytest.FixtureRequest) -> Path:
    return HERE / str(request.param)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def unlike(tensor: torch.Tensor) -> torch.Tensor:
    """A target with every byte wrong."""
    wrong = bytes(255 - byte for byte in bits(tensor))
    if tensor.dtype is torch.bool:
        wrong = bytes(byte & 1 for byte in wrong)
    return torch.frombuffer(bytearray(wrong), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def expected_tensors(folder: Path) -> dict[str, Any]:
    """By group and name; what is stored at the top comes as the group "more"."""
    model = {
        "model": {
            "rows": values.sharded(3),
            "columns": values.sharded(4, torch.bfloat16),
            "same": values.sharded(2),
            "one row": torch.full((1, 2), 9.0),
            "tied": torch.arange(4.0),
            "also tied": torch.arange(4.0),
            "chunked": values.chunked(),
        }
    }
    if folder.name == "apart":
        return model
    return model | {
        "dtypes": {name: values.of_dtype(name) for name in values.DTYPES},
        "odd": {"": torch.tensor(1), "a/../b": torch.tensor(2), "__metadata__": torch.tensor(3), 7: torch.tensor(4)},
        "more": {"nan": values.nan_payloads(), "scalar": torch.tensor(2.5, dtype=torch.float64)},
    }


def test_every_tensor_loads_bit_for_bit(folder: Path) -> None:
    expected = expected_tensors(folder)
    target = {group: {name: unlike(tensor) for name, tensor in tensors.items()} for group, tensors in expected.items()}
    nested = {group: tensors for group, tensors in target.items() if group != "more"}
    hpdcp.load({**nested, **target.get("more", {})}, checkpoint_id=folder)
    for group, tensors in expected.items():
        for name, tensor in tensors.items():
            assert bits(target[group][name]) == bits(tensor), (group, name)


def test_a_tensor_without_elements_is_on_record(together: Path) -> None:
    hpdcp.load({"empty": torch.empty(0, 3, dtype=torch.int32)}, checkpoint_id=together)
    record = Metadata.from_bytes((together / METADATA).read_bytes(), where="golden").state_dict_metadata["empty"]
    assert record == TensorStorageMetadata("int32", (0, 3), ())


def test_a_tensor_made_of_tensors_loads_into_its_own_class_alone() -> None:
    folder, stored = HERE / "version_1_3" / "together", values.scaled()
    target = values.Scaled(torch.zeros_like(stored.codes), torch.zeros_like(stored.scale), stored.bits)
    hpdcp.load({"scaled": target}, checkpoint_id=folder)
    assert torch.equal(target.codes, stored.codes) and torch.equal(target.scale, stored.scale)
    parts = {"codes": torch.zeros_like(stored.codes), "scale": torch.zeros_like(stored.scale)}
    with pytest.raises(hpdcp.errors.LoadMismatchError, match=r"'scaled' .*Scaled"):
        hpdcp.load({"scaled": parts}, checkpoint_id=folder)
    assert not parts["codes"].any()


def test_any_slice_loads(folder: Path) -> None:
    for name, whole in expected_tensors(folder)["model"].items():
        if whole.ndim != 2 or whole.shape[0] < 3:
            continue
        part = unlike(whole[1:3, 1:].contiguous())
        box = hpdcp.ChunkStorageMetadata((1, 1), tuple(part.shape))
        setattr(part, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(box, tuple(whole.shape)))
        hpdcp.load({"model": {name: part}}, checkpoint_id=folder)
        assert bits(part) == bits(whole[1:3, 1:]), name


def test_every_python_value_loads_with_its_type(together: Path) -> None:
    target: dict[str, Any] = {"values": None}
    hpdcp.load(target, checkpoint_id=together)
    expected = values.values()
    found = target["values"]
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and np.array_equal(found[name], value)
        else:
            assert found[name] == value and repr(found[name]) == repr(value), name


def test_every_rank_s_own_state_is_handed_over(folder: Path) -> None:
    target = {"rng": hpdcp.PerRank.all()}
    hpdcp.load(target, checkpoint_id=folder)
    for rank, found in enumerate(target["rng"].value):
        expected = values.of_rank(rank)
        assert torch.equal(found.pop("state"), expected.pop("state")) and found == expected
    assert len(target["rng"].value) == values.WORLD


def test_checksums_hold(folder: Path) -> None:
    reader = hpdcp.FileSystemReader(folder, verify="always")
    hpdcp.load({"model": expected_tensors(folder)["model"], "rng": hpdcp.PerRank.all()}, storage_reader=reader)


def test_the_metadata_reads_as_it_was_recorded(together: Path) -> None:
    data = (together / METADATA).read_bytes()
    assert f'"format":"hpdcp","version":"{VERSIONS[together.parent.name]}"'.encode() in data
    metadata = Metadata.from_bytes(data, where="golden")
    assert metadata.world_size == values.WORLD and metadata.settings["layout"] == "safetensors"
    record = metadata.state_dict_metadata["model.rows"]
    assert isinstance(record, TensorStorageMetadata)
    assert record.size == (5, 3) and [chunk.sizes for chunk in record.chunks] == [(3, 3), (2, 3)]
    tied = metadata.state_dict_metadata["model.tied"]
    assert isinstance(tied, TensorStorageMetadata) and tied.alias_of == "model.also tied"
    assert isinstance(metadata.state_dict_metadata["rng.state"], PerRankStorageMetadata)
    for name, size in metadata.files.items():
        assert (together / name).stat().st_size == size
