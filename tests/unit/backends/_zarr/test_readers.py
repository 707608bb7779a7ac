"""Checkpoints in the zarr layout as other programs see them: zarr-python and tensorstore, without hpdcp."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from zarr.errors import ZarrUserWarning

import hpdcp
from hpdcp._base import config
from hpdcp_backends import zarr_dtypes
from hpdcp_backends._zarr import grid

NUMPY = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
         "float64", "complex64", "complex128")  # fmt: skip
REGISTERED = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
BYTES = ("complex32", "quint8", "int4", "float4_e2m1fn_x2")


@pytest.fixture(autouse=True)
def zarr_layout() -> Iterator[None]:
    with config.using(layout="zarr"):
        yield


def filled(dtype: torch.dtype, shape: tuple[int, ...] = (5, 6)) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count) * 37 % 113).to(torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(shape)


def as_bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def torch_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def by_tensorstore(path: Path) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return tensorstore.open(spec, open=True).result()


@pytest.mark.parametrize("options", [{}, {"compressor": "zstd"}], ids=["plain", "compressed"])
@pytest.mark.parametrize("small", [8, 1 << 20])
@pytest.mark.parametrize("name", [*NUMPY, *REGISTERED])
def test_zarr_and_tensorstore_read_equal_values_of_the_right_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, small: int, options: Mapping[str, object]
) -> None:
    monkeypatch.setattr(grid, "SMALL_BYTES", small)
    monkeypatch.setattr(grid, "LARGE_BYTES", 4 * small)
    zarr_dtypes.register()
    saved = filled(getattr(torch, name))
    with config.using(layouts={"zarr": options}):
        hpdcp.save({"model": {"w": saved}}, checkpoint_id=tmp_path)
    array = zarr.open_group(tmp_path, mode="r")["model"]["w"]
    store = by_tensorstore(tmp_path / "model/w")
    assert array.shape == store.shape == (5, 6)
    assert array.dtype.name == name
    assert store.dtype.name == name
    assert as_bytes(array[...]) == torch_bytes(saved)
    assert as_bytes(store.read().result()) == torch_bytes(saved)
    assert as_bytes(array[1:4, 2:5]) == torch_bytes(saved[1:4, 2:5])
    assert array.attrs["hpdcp"]["dtype"] == name


@pytest.mark.parametrize("name", BYTES)
def test_a_dtype_that_zarr_has_no_name_for_is_bytes_with_torchs_name_beside(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    raw = filled(torch.uint8, (5, 6 * dtype.itemsize))
    saved = raw.view(dtype)
    hpdcp.save({"w": saved}, checkpoint_id=tmp_path)
    array = zarr.open_group(tmp_path, mode="r")["w"]
    assert array.attrs["hpdcp"]["dtype"] == name
    assert array.shape == (*saved.shape, dtype.itemsize)
    assert array.dtype == np.uint8
    assert as_bytes(array[...]) == torch_bytes(raw)
    target = {"w": torch.zeros_like(raw).view(dtype)}
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["w"].view(torch.uint8), raw)


def test_plain_zarr_opens_all_but_what_needs_another_package(tmp_path: Path) -> None:
    """In a process that has never heard of hpdcp: no dtype of ours is registered there."""
    state = {"model": {"w": torch.arange(6.0), "half": torch.ones(3).bfloat16()}, "step": 3}
    hpdcp.save(state, checkpoint_id=tmp_path)
    script = (
        "import sys, zarr\n"
        "group = zarr.open_group(sys.argv[1], mode='r')\n"
        "print(group['model']['w'][...].tolist())\n"
        "print(sorted(group.attrs['hpdcp']))\n"
        "assert not any(name.startswith('hpdcp') for name in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]",
        "['attempt', 'name', 'tied', 'version', 'world_size']",
    ]


def test_the_hierarchy_can_be_walked_and_names_tied_tensors(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    state = {"model": {"embed": tied, "head": tied, "blocks": [{"w": torch.ones(2)}]}, "none": torch.zeros(0, 3)}
    hpdcp.save(state, checkpoint_id=tmp_path)
    group = zarr.open_group(tmp_path, mode="r")
    # zarr remarks on hpdcp's own files at the root, and leaves them out.
    with pytest.warns(ZarrUserWarning, match="not recognized"):
        found = {path: node for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    assert sorted(found) == ["model/blocks/0/w", "model/embed", "none"]
    assert group.attrs["hpdcp"]["tied"] == {"model/head": "model.embed"}
    assert found["none"].shape == (0, 3)


def test_a_thousand_small_tensors_cost_two_objects_each(tmp_path: Path) -> None:
    metadata = hpdcp.save({"model": {f"w{n}": torch.ones(64) for n in range(100)}}, checkpoint_id=tmp_path)
    # A chunk and a description each, and the root's and model's.
    assert len(metadata.files) == 2 * 100 + 2


def test_registering_twice_is_fine_and_makes_arrays_writable(tmp_path: Path) -> None:
    zarr_dtypes.register()
    zarr_dtypes.register()
    data = filled(torch.bfloat16).view(torch.uint16).numpy().view("V2")
    kind = zarr_dtypes.BFloat16()
    array = zarr.create_array(tmp_path / "x", shape=(5, 6), dtype=kind.to_native_dtype(), fill_value=float("nan"))
    array[...] = data.view(kind.to_native_dtype())
    again = zarr.open_array(tmp_path / "x", mode="r")
    assert as_bytes(again[...]) == as_bytes(data)
    assert np.isnan(np.float32(again.fill_value))
