"""Data files that are links out of the checkpoint's folder are not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp import config
from hpdcp.errors import CorruptCheckpointError, InvalidArgumentError, StorageError, UnsupportedTypeError


@pytest.mark.parametrize("layout", ["safetensors", "zarr"])
def test_a_data_file_that_is_a_link_out_of_the_folder_is_not_followed(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    with config.using(layout=layout):
        hpdcp.save({"w": torch.ones(2), "step": 1}, checkpoint_id=folder)
    for name in [path for path in folder.rglob("*") if path.is_file() and path.name not in (".metadata", ".attempt")]:
        outside = tmp_path / "outside"
        name.rename(outside)
        name.symlink_to(outside)
        target = {"w": torch.zeros(2), "step": 0}
        if name.suffix == ".json":  # describes an array to others, and is not read
            hpdcp.load(target, checkpoint_id=folder)
        else:
            with pytest.raises(CorruptCheckpointError, match="is a link to"):
                hpdcp.load(target, checkpoint_id=folder)
            assert not target["w"].any()
        name.unlink()
        outside.rename(name)


def test_links_to_the_folder_and_within_it_are_followed(tmp_path: Path) -> None:
    hpdcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step")
    (tmp_path / "latest").symlink_to(tmp_path / "step")
    (name,) = (tmp_path / "step").glob("*.safetensors")
    name.rename(name.with_name("kept"))
    name.symlink_to("kept")
    target = {"w": torch.zeros(2)}
    hpdcp.load(target, checkpoint_id=tmp_path / "latest")
    assert target["w"].all()


def test_metadata_that_is_a_hole_is_not_read_into_memory(tmp_path: Path) -> None:
    hpdcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    os.truncate(tmp_path / ".metadata", 1 << 40)
    with pytest.raises(StorageError, match=r"\.metadata"):
        hpdcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path)


def test_names_that_no_file_and_no_text_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="lone surrogate"):
        hpdcp.save({"w": 1}, checkpoint_id=f"{tmp_path}/\ud800")
    with pytest.raises(UnsupportedTypeError, match="digits"):
        hpdcp.save({10**5000: 1}, checkpoint_id=tmp_path)
