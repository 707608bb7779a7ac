"""Every dtype of dense tensors comes back bit for bit, NaN payloads included."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import hpdcp
from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._format.metadata import TensorStorageMetadata

_ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_QUANTISED = [dtype for dtype in _ALL if str(dtype).startswith(("torch.qint", "torch.quint"))]
_DENSE = [dtype for dtype in _ALL if dtype not in _QUANTISED]


def _bits(dtype: torch.dtype, elements: int, seed: int) -> bytes:
    """Bytes of every kind; for bool the two that are valid."""
    raw = np.random.default_rng(seed).integers(0, 256, elements * dtype.itemsize, dtype=np.uint8)
    return bytes(raw & 1) if dtype is torch.bool else bytes(raw)


def _tensor(data: bytes, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def _stored_bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage())


def test_this_torch_has_the_dtypes_these_tests_are_about() -> None:
    assert {torch.float8_e4m3fn, torch.bfloat16, torch.complex32, torch.uint64, torch.bool} <= set(_DENSE)
    assert len(_DENSE) >= 25


@pytest.mark.parametrize("dtype", _DENSE, ids=str)
def test_every_dense_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    data = _bits(dtype, 35, seed=1)
    metadata = hpdcp.save(
        {"t": _tensor(data, dtype, 5, 7), "none": torch.empty(0, dtype=dtype)}, checkpoint_id=tmp_path
    )
    recorded = metadata.state_dict_metadata["t"]
    assert isinstance(recorded, TensorStorageMetadata)
    assert (recorded.dtype, recorded.size) == (str(dtype).removeprefix("torch."), (5, 7))
    target = _tensor(_bits(dtype, 35, seed=2), dtype, 5, 7)
    empty = torch.empty(0, dtype=dtype)
    assert _stored_bits(target) != data
    hpdcp.load({"t": target, "none": empty}, checkpoint_id=tmp_path)
    assert _stored_bits(target) == data


@pytest.mark.parametrize("dtype", _DENSE, ids=str)
def test_every_dense_dtype_fills_a_target_that_lies_transposed_in_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    data = _bits(dtype, 35, seed=1)
    hpdcp.save({"t": _tensor(data, dtype, 5, 7)}, checkpoint_id=tmp_path)
    base = _tensor(_bits(dtype, 35, seed=2), dtype, 7, 5)
    hpdcp.load({"t": base.t()}, checkpoint_id=tmp_path)
    elements = np.frombuffer(data, dtype=f"V{dtype.itemsize}").reshape(5, 7)
    assert _stored_bits(base) == elements.T.tobytes()


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        (torch.float64, struct.pack("<4Q", 0x7FF8000000000001, 0xFFF0000000000BAD, 1 << 63, 0x7FF0000000000000)),
        (torch.float32, struct.pack("<4I", 0x7FC00001, 0xFF800BAD, 0x80000000, 0x7F800000)),
        (torch.float16, struct.pack("<4H", 0x7E01, 0xFC0D, 0x8000, 0x7C00)),
        (torch.bfloat16, struct.pack("<4H", 0x7FC1, 0xFF8D, 0x8000, 0x7F80)),
        (torch.complex64, struct.pack("<4I", 0x7FC00001, 0xFF800BAD, 0x80000000, 0x7F800001)),
    ],
    ids=str,
)
def test_the_payloads_of_nans_and_the_sign_of_zero_survive(tmp_path: Path, dtype: torch.dtype, patterns: bytes) -> None:
    count = len(patterns) // dtype.itemsize
    hpdcp.save({"t": _tensor(patterns, dtype, count)}, checkpoint_id=tmp_path)
    contiguous, strided = torch.zeros(count, dtype=dtype), torch.zeros(2 * count, dtype=dtype)
    hpdcp.load({"t": contiguous}, checkpoint_id=tmp_path)
    hpdcp.load({"t": strided[::2]}, checkpoint_id=tmp_path)
    assert _stored_bits(contiguous) == patterns
    assert _stored_bits(strided[::2].contiguous()) == patterns


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_refused_by_name(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedTypeError, match=r"layer.weight.*quantised.*int_repr"):
        hpdcp.save({"layer": {"weight": quantised}}, checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists()
