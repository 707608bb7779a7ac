"""numpy arrays, numpy scalars and tensors nested in Python values keep their dtype, shape and every bit."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hpdcp._state.objects import PickledObjectWarning, decode, encode


def back(value: object) -> Any:
    stored = encode(value, key="k")
    assert not stored.pickled
    return decode(stored.data, key="k")


STRUCTURED = np.dtype([("a", "<i2"), ("b", "<f8", (2,)), ("c", [("d", "S3"), ("e", ">u4")])], align=True)
ARRAYS = [
    *(np.arange(6).reshape(2, 3).astype(code) for code in "?bBhHiIlLefdFD"),
    np.arange(4, dtype=">i4"),
    np.array(["2024-01-01", "NaT"], dtype="M8[ns]"),
    np.array([1, 2], dtype="m8[3h]"),
    np.array(["a", "ünï"]),
    np.array([b"a\x00b", b""]),
    np.zeros((2, 2), STRUCTURED),
    np.array([b"12345678"], dtype="V8"),
    np.zeros((0, 3), "f4"),
    np.array(3.5),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(24).reshape(2, 3, 4)[:, ::-2],
    np.array([np.nan, -0.0, np.inf]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}"[:40])
def test_an_array_comes_back(array: np.ndarray[Any, Any]) -> None:
    restored = back({"x": [array]})["x"][0]
    assert type(restored) is np.ndarray
    assert (restored.dtype, restored.shape) == (array.dtype, array.shape)
    assert restored.tobytes() == array.tobytes()
    assert restored.flags.writeable
    assert restored.flags.f_contiguous == (array.flags.f_contiguous or array.size == 0)


SCALARS = [
    np.float64(0.1),
    np.float32("nan"),
    np.int8(-3),
    np.uint64(1 << 63),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.float16(1.5),
    np.datetime64("2024-02-29", "D"),
    np.timedelta64(3, "s"),
    np.str_("trailing\x00"),
    np.str_(""),
    np.bytes_(b"trailing\x00"),
    np.ones((), STRUCTURED)[()],
]


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_a_scalar_comes_back_as_a_scalar(scalar: np.generic) -> None:
    restored = back([scalar])[0]
    assert type(restored) is type(scalar)
    assert restored.dtype == scalar.dtype
    # Compared as bytes but for structured ones, whose padding is not a value.
    assert restored == scalar if scalar.dtype.fields else restored.tobytes() == scalar.tobytes()


def test_scalars_are_keys_and_members_of_sets() -> None:
    assert back({np.int64(3): 1}) == {np.int64(3): 1}
    restored = back({np.float32(0.5), np.int16(2)})
    assert {type(item) for item in restored} == {np.float32, np.int16}


def test_padding_between_fields_does_not_change_the_bytes() -> None:
    dtype = np.dtype([("a", "i1"), ("b", "i8")], align=True)
    dirty = np.frombuffer(b"\xff" * 32, np.uint8).copy().view(dtype)
    clean = np.zeros(2, dtype)
    for array in (dirty, clean):
        array["a"], array["b"] = 1, 2
    assert dirty.tobytes() != clean.tobytes()
    assert encode(dirty, key="k") == encode(clean, key="k")


@pytest.mark.parametrize(
    "value",
    [
        np.array([{}, None], dtype=object),
        np.ma.masked_array([1, 2], [True, False]),
        np.longdouble(1) / 3,
        np.array([1, 2]).view(np.recarray),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_exact_form_is_pickled_with_a_warning(value: object) -> None:
    with pytest.warns(PickledObjectWarning, match="'some.key'"):
        stored = encode(value, key="some.key")
    restored = decode(stored.data, key="some.key", allow_pickle=True)
    assert type(restored) is type(value)
    assert repr(restored) == repr(value)


# A quantised tensor is more than its bytes: it carries a scale, and is pickled.
DTYPES = sorted(
    {str(dtype)[6:] for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "qu" not in str(dtype)}
    - {"qint8", "qint32"}
)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_tensor_of_every_dtype_comes_back_bit_for_bit(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(250, 250 + 6 * dtype.itemsize).to(torch.uint8)
    tensor = (raw % 2).to(torch.bool).reshape(2, 3) if dtype is torch.bool else raw.view(dtype).reshape(2, 3)
    restored = back(deque([tensor, tensor[:0], tensor[1, 1]]))
    for mine, theirs in zip(restored, [tensor, tensor[:0], tensor[1, 1]], strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if mine.numel():
            assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def test_a_tensor_keeps_its_class_and_whether_it_wants_a_gradient() -> None:
    parameter = torch.nn.Parameter(torch.eye(3).T)
    frozen = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    wanted = torch.ones(2, requires_grad=True)
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    restored = back({"x": deque([parameter, frozen, wanted, conjugate])})["x"]
    assert [type(item) for item in restored] == [torch.nn.Parameter, torch.nn.Parameter, torch.Tensor, torch.Tensor]
    assert [item.requires_grad for item in restored] == [True, False, True, False]
    assert torch.equal(restored[0], parameter)
    assert torch.equal(restored[3], conjugate.resolve_conj())


def test_a_blob_with_arrays_is_a_safetensors_file(tmp_path: Path) -> None:
    stored = encode(
        [np.arange(3, dtype="i1"), {"w": np.eye(2)}, torch.ones(2, dtype=torch.bfloat16), b"x" * 999], key="k"
    )
    (tmp_path / "blob.safetensors").write_bytes(stored.data)
    with safe_open(tmp_path / "blob.safetensors", "pt") as blob:
        assert {key: blob.get_tensor(key).dtype for key in blob.keys()} == {  # noqa: SIM118 - not a dict
            "0": torch.int8,
            "1": torch.float64,
            "2": torch.bfloat16,
            "3": torch.uint8,
        }
        assert torch.equal(blob.get_tensor("1"), torch.eye(2, dtype=torch.float64))


def test_the_result_does_not_share_memory_with_the_bytes() -> None:
    data = bytearray(encode([np.zeros(4), deque([torch.zeros(4)])], key="k").data)
    array, (tensor,) = decode(memoryview(data), key="k")
    data[-64:] = b"\xff" * 64
    assert not array.any()
    assert not tensor.any()
