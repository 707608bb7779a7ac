"""States to save, and whether what came back is the same."""

from __future__ import annotations

from typing import Any

import torch

from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
from hpdcp._state.geometry import Box

DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip

ODD_NAMES = (
    "with space", "a/b", "a\\b", "..", ".", "c", "zarr.json", "__metadata__", "%2F", "_rank0_.bytes", "0.metadata",
    ".attempt", "x" * 300, "ünï-日本-🙂", "", "tab\t", "hash#?*[0]",
)  # fmt: skip


def mixed_state(fill: float) -> dict[str, Any]:
    """A little of everything, one tensor longer than a block of checksums."""
    return {
        "w": torch.arange(35.0).reshape(5, 7) + fill,
        "half": torch.full((9,), fill).bfloat16(),
        "long": torch.full((600, 1 << 11), fill) + torch.arange(float(1 << 11)),
        "scalar": torch.tensor(fill),
        "empty": torch.zeros(0, 3),
        "inner": {"x": torch.full((2, 2), fill, dtype=torch.float64)},
        "step": f"number {fill}",
    }


def assert_equal(found: Any, expected: Any) -> None:
    """Fails unless both are the same containers of the same tensors and values."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(map(str, found)) == list(map(str, expected))
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    return tensor.contiguous().view(torch.uint8)


def cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    """One box of a tensor, in memory of its own, marked as what it is."""
    part = full[tuple(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))].clone()
    setattr(part, CHUNK_INFO, ChunkInfo(ChunkStorageMetadata(box.offsets, box.sizes), tuple(full.shape)))
    return part
