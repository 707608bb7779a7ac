"""What the golden checkpoints hold: every value follows from arithmetic, so that a test can say what must load.

Never change a value here: checkpoints that were written with it are committed beside this file.
"""

from __future__ import annotations

import datetime
import pathlib
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

WORLD = 2
# fmt: off
DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)
# fmt: on
ROWS = 5
"""Of the sharded tensors: rank 0 holds three, rank 1 two."""


def of_dtype(name: str) -> torch.Tensor:
    """Six elements with every byte told apart from its neighbours; some of the floats are NaNs with payloads."""
    dtype: torch.dtype = getattr(torch, name)
    raw = bytes((17 * i + len(name)) % 256 for i in range(6 * dtype.itemsize))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(2, 3)


def sharded(columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements count from 1."""
    return torch.arange(1, ROWS * columns + 1, dtype=torch.float64).to(dtype).reshape(ROWS, columns)


def chunked() -> torch.Tensor:
    """The whole of the tensor that ranks hold as `ChunkInfo` chunks: four rows of rank 0, two of rank 1."""
    return -torch.arange(24, dtype=torch.int64).reshape(6, 4)


def nan_payloads() -> torch.Tensor:
    patterns = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x7F7FFFFF]
    return torch.frombuffer(bytearray(struct.pack("<6I", *patterns)), dtype=torch.float32)


def values() -> dict[Any, Any]:
    """Python values of every kind that loads without pickle."""
    return {
        "int": 2**70,
        "float": [0.1, float("inf"), -0.0],
        "text": "über ключ 键 🙂 \ud800",
        "bytes": bytes(range(256)),
        "complex": 1 - 2j,
        "tuple": (1, ("two", [3.0, None, True])),
        "keys": {1: "one", "1": "text", (2, "x"): "pair", None: 0},
        "empty": [[], {}, (), set()],
        "set": {1, 2, 3},
        "frozen": frozenset({"a"}),
        "range": range(1, 10, 3),
        "when": datetime.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=datetime.UTC),
        "path": pathlib.PurePosixPath("a/b"),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(1.5),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
    }


def of_rank(rank: int) -> dict[str, Any]:
    """State that differs on every rank."""
    return {"seed": 1000 + rank, "state": torch.arange(4, dtype=torch.uint8) + 10 * rank, "names": [f"rank {rank}"]}


class Scaled(torch.Tensor):
    """A tensor made of others: codes, and a scale for each row."""

    codes: torch.Tensor
    scale: torch.Tensor
    bits: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, bits: int) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale, made.bits = codes, scale, bits
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale"], {"bits": self.bits, "made_by": (Scaled, torch.int8)}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError("only the tensors inside are stored")


def scaled() -> Scaled:
    return Scaled(torch.arange(-6, 6, dtype=torch.int8).reshape(3, 4), torch.tensor([0.5, 0.25, 2.0]), 8)
