"""A dtype that differs is cast as `copy_` does, with one warning that counts them, or refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp import StandardLoadPlanner
from hpdcp._base.errors import DtypeMismatchError

_VALUES = [0.0, -1.5, 3.7, 300.25, -0.1]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {
        "f32": torch.tensor(_VALUES),
        "f64": torch.tensor(_VALUES, dtype=torch.float64),
        "i64": torch.arange(-2, 3),
        "c64": torch.tensor([1 + 2j, -3j], dtype=torch.complex64),
        "f4": torch.frombuffer(bytearray(b"\x12\x34"), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    hpdcp.save(state, checkpoint_id=tmp_path)
    return tmp_path


def _warnings_of_load(state: dict[str, torch.Tensor], checkpoint: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hpdcp.load(state, checkpoint_id=checkpoint)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool, torch.uint8])
@pytest.mark.parametrize("stored", ["f32", "i64"])
def test_a_cast_gives_what_copy_gives(checkpoint: Path, stored: str, wanted: torch.dtype) -> None:
    source = {"f32": torch.tensor(_VALUES), "i64": torch.arange(-2, 3)}[stored]
    strided = torch.zeros(10, dtype=wanted)[::2]
    for target in (torch.zeros(5, dtype=wanted), strided):
        messages = _warnings_of_load({stored: target}, checkpoint)
        assert torch.equal(target, torch.zeros(5, dtype=wanted).copy_(source))
        assert len(messages) == 1


def test_one_warning_counts_all_of_them(checkpoint: Path) -> None:
    half = torch.zeros(5, dtype=torch.bfloat16)
    state = {"f32": half, "f64": torch.zeros(5), "i64": torch.zeros(5, dtype=torch.int64)}
    messages = _warnings_of_load(state, checkpoint)
    assert len(messages) == 1
    assert messages[0].startswith("2 tensors are cast")
    assert "'f32' (stored float32, wanted bfloat16)" in messages[0]
    assert "'f64' (stored float64, wanted float32)" in messages[0]
    assert torch.equal(half, torch.tensor(_VALUES).bfloat16())


def test_equal_dtypes_warn_of_nothing(checkpoint: Path) -> None:
    assert _warnings_of_load({"f32": torch.zeros(5)}, checkpoint) == []


def test_a_cast_may_be_refused_and_then_nothing_is_changed(checkpoint: Path) -> None:
    same, other, third = torch.zeros(5), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int8)
    with pytest.raises(DtypeMismatchError) as caught:
        hpdcp.load(
            {"f32": same, "f64": other, "i64": third},
            checkpoint_id=checkpoint,
            planner=StandardLoadPlanner(allow_dtype_cast=False),
        )
    assert "2 keys cannot be cast" in str(caught.value)
    assert "'f64' (stored float64, wanted bfloat16)" in str(caught.value)
    assert "'i64' (stored int64, wanted int8)" in str(caught.value)
    assert bool((same == 0).all())


def test_a_cast_that_copy_cannot_do_is_an_error_however_lenient(checkpoint: Path) -> None:
    with pytest.raises(DtypeMismatchError, match=r"'f4' \(stored float4_e2m1fn_x2, wanted float32\)"):
        hpdcp.load({"f4": torch.zeros(2)}, checkpoint_id=checkpoint)


def test_complex_values_keep_their_real_part_in_a_real_target(checkpoint: Path) -> None:
    target = torch.zeros(2)
    messages = _warnings_of_load({"c64": target}, checkpoint)
    assert target.tolist() == [1, 0]
    assert sum("cast" in message and "'c64'" in message for message in messages) == 1
