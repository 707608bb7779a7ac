"""Memory that is gone, read-only or someone else's: refused by key on save and load, and nothing is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import hpdcp
from hpdcp._base.errors import UnsupportedTypeError


def _freed(keep: int = 0) -> torch.Tensor:
    tensor = torch.ones(100_000)
    tensor.untyped_storage().resize_(keep * 4)
    return tensor


def _part_of_freed() -> torch.Tensor:
    whole = torch.ones(100_000)
    part = whole[500:700].view(torch.uint8)
    whole.untyped_storage().resize_(2000)
    return part


@pytest.mark.parametrize("save", [hpdcp.save, hpdcp.async_save], ids=["save", "async_save"])
def test_a_tensor_whose_storage_was_freed_is_refused_by_name_on_save(
    tmp_path: Path, save: Callable[..., object]
) -> None:
    for number, bad in enumerate((_freed(), _freed(99_999), _part_of_freed())):
        with pytest.raises(UnsupportedTypeError, match=r"layer\.weight: its storage has \d+ bytes"):
            save({"good": torch.ones(3), "layer": {"weight": bad}}, checkpoint_id=tmp_path / str(number))
        assert not (tmp_path / str(number) / ".metadata").exists()


def test_a_target_whose_storage_was_freed_is_refused_by_name(tmp_path: Path) -> None:
    hpdcp.save({"w": torch.ones(100_000), "b": torch.ones(3)}, checkpoint_id=tmp_path)
    beside = torch.zeros(3)
    for bad in (_freed(), _freed(99_999), torch.nn.Parameter(_freed(1))):
        with pytest.raises(UnsupportedTypeError, match="w: its storage has"):
            hpdcp.load({"b": beside, "w": bad}, checkpoint_id=tmp_path)
    assert beside.tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("stored", [torch.float32, torch.float64], ids=["read into", "cast into"])
def test_a_map_of_a_file_open_for_reading_is_no_target(tmp_path: Path, stored: torch.dtype) -> None:
    path = tmp_path / "array"
    np.zeros(5000, dtype=np.float32).tofile(path)
    hpdcp.save({"w": torch.ones(5000, dtype=stored), "part": torch.ones(2, dtype=stored)}, checkpoint_id=tmp_path / "c")
    over = torch.from_numpy(np.memmap(path, np.float32, mode="r"))
    for target in ({"w": over}, {"w": over.detach().requires_grad_()}, {"part": over[7:9]}):
        with pytest.raises(UnsupportedTypeError, match="may only be read"):
            hpdcp.load(target, checkpoint_id=tmp_path / "c")
    assert not np.fromfile(path, np.float32).any()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda base: base[:3], lambda base: base[1:4]),
        (lambda base: base[:3], lambda base: base.as_strided((3, 2), (4, 2), 3)),
        (lambda base: base[:3], lambda base: base[:3].view(2, 3).t()),
    ],
    ids=["rows", "a window", "another shape"],
)
def test_targets_that_overlap_in_memory_are_refused_and_both_are_named(
    tmp_path: Path, first: Callable[[torch.Tensor], torch.Tensor], second: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    memory = torch.zeros(20)
    base = memory[:8].view(4, 2)
    targets = {"first": first(base), "second": second(base)}
    hpdcp.save({name: torch.ones_like(target) for name, target in targets.items()}, checkpoint_id=tmp_path)
    with pytest.raises(UnsupportedTypeError, match="'first' and 'second' overlap in memory"):
        hpdcp.load(targets, checkpoint_id=tmp_path)
    assert not memory.any()


def test_columns_of_one_tensor_and_one_tensor_under_two_names_are_fine_as_targets(tmp_path: Path) -> None:
    full = torch.arange(24.0).view(4, 6)
    hpdcp.save({"q": full[:, :2], "k": full[:, 2:4], "v": full[:, 4:], "again": full[:, 4:]}, checkpoint_id=tmp_path)
    base = torch.zeros(4, 6)
    targets = {"q": base[:, :2], "k": base[:, 2:4], "v": base[:, 4:], "again": base[:, 4:]}
    hpdcp.load(targets, checkpoint_id=tmp_path)
    assert torch.equal(base, full)
