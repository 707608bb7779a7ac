"""Groups of zarr that something else wrote load as tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

import hpdcp
from hpdcp._base import config
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    LoadMismatchError,
    NotSupportedError,
    UnsupportedFormatError,
)
from hpdcp._manage.inspect import inspect_checkpoint
from hpdcp._state.geometry import Box
from hpdcp.testing._layout.states import cut
from hpdcp_backends import zarr_dtypes
from hpdcp_backends._zarr import groups


def write(folder: Path, name: str, data: np.ndarray, **options: Any) -> Any:
    group = zarr.open_group(folder, mode="a")
    array = group.create_array(name, shape=data.shape, dtype=data.dtype, **options)
    array[...] = data
    return array


MATRIX = np.arange(120, dtype=np.float32).reshape(10, 12)


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (3, 5), "compressors": None},
        {"chunks": (3, 5), "compressors": [ZstdCodec(level=3)]},
        {"chunks": (2, 4), "shards": (4, 12), "compressors": [BloscCodec(cname="lz4")]},
        {"chunks": (10, 12), "compressors": [GzipCodec()], "chunk_key_encoding": {"name": "v2", "separator": "."}},
    ],
    ids=["plain", "zstd", "sharded", "gzip"],
)
def test_arrays_of_any_chunks_and_codecs_load_whole_and_in_part(tmp_path: Path, options: dict[str, Any]) -> None:
    write(tmp_path, "model/w", MATRIX, **options)
    target = {"model": {"w": torch.zeros(10, 12)}}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["model"]["w"], torch.from_numpy(MATRIX))
    part = {"model": {"w": cut(torch.zeros(10, 12), Box((2, 3), (5, 7)))}}
    hpdcp.load(part, checkpoint_id=tmp_path)
    assert torch.equal(part["model"]["w"], torch.from_numpy(MATRIX[2:7, 3:10]))


def test_large_arrays_are_read_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_SLAB_BYTES", 100)
    write(tmp_path, "w", MATRIX, chunks=(3, 5))
    target = {"w": cut(torch.zeros(10, 12), Box((1, 1), (9, 11)))}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], torch.from_numpy(MATRIX[1:, 1:]))


@pytest.mark.parametrize("kind", [">f4", "<i2", "?", "u8", "c16", "f2"])
def test_dtypes_of_numpy_in_either_byte_order_load(tmp_path: Path, kind: str) -> None:
    data = (np.arange(12) % 2).reshape(3, 4).astype(kind)
    write(tmp_path, "w", data)
    native = torch.from_numpy(data.astype(data.dtype.newbyteorder("=")))
    target = {"w": torch.zeros_like(native)}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"], native)


def test_registered_dtypes_scalars_and_empty_arrays_load(tmp_path: Path) -> None:
    zarr_dtypes.register()
    half = torch.arange(6.0).bfloat16()
    kind = zarr_dtypes.BFloat16().to_native_dtype()
    write(tmp_path, "half", half.view(torch.uint16).numpy().view(kind))
    write(tmp_path, "scalar", np.array(2.5))
    write(tmp_path, "empty", np.zeros((0, 3), dtype=np.float32))
    target = {"half": torch.zeros(6).bfloat16(), "scalar": torch.tensor(0.0).double(), "empty": torch.zeros(0, 3)}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["half"], half)
    assert target["scalar"].item() == 2.5


def test_a_chunk_that_was_never_written_is_the_fill_value(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path, mode="a")
    array = group.create_array("w", shape=(4,), chunks=(2,), dtype="f4", fill_value=7)
    array[:2] = 1
    target = {"w": torch.zeros(4)}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [1, 1, 7, 7]


def test_groups_of_version_2_load_too(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path, mode="a", zarr_format=2)
    group.create_array("a", shape=(3,), dtype="f4")[...] = np.arange(3)
    target = {"a": torch.zeros(3)}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert target["a"].tolist() == [0, 1, 2]


def test_what_hpdcp_saved_loads_as_a_group_when_its_own_files_are_lost(tmp_path: Path) -> None:
    state: dict[Any, Any] = {
        "model": {"a/b": torch.arange(4.0), "c": torch.ones(2, 2).to(torch.complex32)},
        3: torch.ones(2),
    }
    with config.using(layout="zarr"):
        hpdcp.save(state, checkpoint_id=tmp_path)
    for name in (".metadata", ".attempt"):
        (tmp_path / name).unlink()
    target: dict[Any, Any] = {
        "model": {"a/b": torch.zeros(4), "c": torch.zeros(2, 2).to(torch.complex32)},
        3: torch.zeros(2),
    }
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["model"]["a/b"], torch.arange(4.0))
    assert torch.equal(target["model"]["c"].view(torch.uint8), torch.ones(2, 2).to(torch.complex32).view(torch.uint8))
    assert torch.equal(target[3], torch.ones(2))


def test_inspect_lists_a_plain_group(tmp_path: Path) -> None:
    write(tmp_path, "model/w", MATRIX)
    report = inspect_checkpoint(tmp_path)
    assert report.origin == "zarr"
    assert [(entry.fqn, entry.dtype, entry.shape) for entry in report.entries] == [("model.w", "float32", (10, 12))]


def test_names_that_are_not_there_are_named(tmp_path: Path) -> None:
    write(tmp_path, "w", MATRIX)
    with pytest.raises(LoadMismatchError, match="'v'"):
        hpdcp.load({"v": torch.zeros(10, 12)}, checkpoint_id=tmp_path)
    with pytest.raises(LoadMismatchError, match=r"\[10, 12\]"):
        hpdcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path)


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_arrays_of_text_are_named_when_they_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "w", MATRIX)
    write(tmp_path, "text", np.array(["a", "b"], dtype="U4"))
    target = {"w": torch.zeros(10, 12)}
    hpdcp.load(target, checkpoint_id=tmp_path)
    with pytest.raises(LoadMismatchError, match="text"):
        hpdcp.load({"text": torch.zeros(2)}, checkpoint_id=tmp_path)


def test_one_array_is_no_group(tmp_path: Path) -> None:
    zarr.create_array(tmp_path, shape=(3,), dtype="f4")
    with pytest.raises(UnsupportedFormatError, match="one array"):
        hpdcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path)


def newer(document: dict[str, Any]) -> None:
    document["zarr_format"] = 9


def another_grid(document: dict[str, Any]) -> None:
    document["chunk_grid"] = {"name": "hexagonal", "configuration": {}}


def another_codec(document: dict[str, Any]) -> None:
    document["codecs"] = [{"name": "made_up", "configuration": {}}]


def another_dtype(document: dict[str, Any]) -> None:
    document["data_type"] = "float3"


@pytest.mark.parametrize("change", [newer, another_grid, another_codec, another_dtype])
def test_what_zarr_cannot_read_is_an_error_that_says_where(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    write(tmp_path, "w", MATRIX)
    path = tmp_path / "w/zarr.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptCheckpointError, match="zarr cannot read"):
        hpdcp.load({"w": torch.zeros(10, 12)}, checkpoint_id=tmp_path)


def test_a_damaged_document_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "w", MATRIX)
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node')
    with pytest.raises(CorruptCheckpointError, match="zarr cannot read"):
        hpdcp.load({"w": torch.zeros(10, 12)}, checkpoint_id=tmp_path)


def test_a_save_that_did_not_finish_is_not_taken_for_a_group(tmp_path: Path) -> None:
    with config.using(layout="zarr"):
        hpdcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(IncompleteCheckpointError):
        hpdcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path)


def test_a_folder_without_anything_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        hpdcp.load({"w": torch.zeros(3)}, checkpoint_id=tmp_path)


def test_without_zarr_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "w", MATRIX)
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    with pytest.raises(NotSupportedError, match=r"hpdcp\[zarr\]"):
        hpdcp.load({"w": torch.zeros(10, 12)}, checkpoint_id=tmp_path)
