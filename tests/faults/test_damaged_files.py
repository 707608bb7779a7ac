"""Data files that were cut off, lost, swapped or flipped: named in the error, and before any target has changed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    HpdcpError,
    IncompleteCheckpointError,
)
from hpdcp._format.checksums import HEAD_BYTES
from hpdcp._format.file_names import METADATA
from hpdcp._manage.verify import verify_checkpoint

SENTINEL = -7.0


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "w": torch.arange(3000, dtype=torch.float32) * value,
        "odd": torch.full((3, 7), value, dtype=torch.bfloat16),
        "step": int(value),
    }


def targets() -> dict[str, Any]:
    return {"w": torch.full((3000,), SENTINEL), "odd": torch.full((3, 7), SENTINEL, dtype=torch.bfloat16), "step": -7}


def assert_untouched(target: dict[str, Any]) -> None:
    assert bool((target["w"] == SENTINEL).all()) and bool((target["odd"] == SENTINEL).all()) and target["step"] == -7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt"
    hpdcp.save(state(), checkpoint_id=path)
    return path


def tensors(folder: Path) -> Path:
    return next(folder.glob("_rank0_*.safetensors"))


def objects(folder: Path) -> Path:
    return next(folder.glob("_rank0_*.bytes"))


def flip(path: Path, position: int, mask: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def cut_to(length: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[:length])


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "lost": lambda path: path.unlink(),
    "empty": cut_to(0),
    "cut in the header": cut_to(100),
    "cut at the end": cut_to(-1),
    "longer": grow,
    "a folder": make_folder,
    "header length flipped": lambda path: flip(path, 0),
    "header text flipped": lambda path: flip(path, 40),
    "header padding flipped": lambda path: flip(path, HEAD_BYTES - 1),
}


@pytest.mark.parametrize("which", [tensors, objects])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_before_any_target_changes(
    folder: Path, which: Callable[[Path], Path], damage: str
) -> None:
    path = which(folder)
    DAMAGE[damage](path)
    target = targets()
    with pytest.raises(HpdcpError) as caught:
        hpdcp.load(target, checkpoint_id=folder)
    assert path.name in str(caught.value) and str(folder) in str(caught.value)
    if damage != "a folder":
        assert isinstance(caught.value, CorruptCheckpointError)
    assert_untouched(target)


@pytest.mark.parametrize("which", [tensors, objects])
def test_a_file_of_another_step_is_told_apart_though_it_has_the_same_size(
    folder: Path, tmp_path: Path, which: Callable[[Path], Path]
) -> None:
    other = tmp_path / "other"
    hpdcp.save(state(2.0), checkpoint_id=other)
    assert which(other).stat().st_size == which(folder).stat().st_size
    shutil.copy(which(other), which(folder))
    target = targets()
    with pytest.raises(CorruptCheckpointError, match="does not begin as the file that was committed"):
        hpdcp.load(target, checkpoint_id=folder)
    assert_untouched(target)


def test_files_swapped_within_a_checkpoint_are_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    hpdcp.save({"a": 1, "b": torch.ones(2)}, checkpoint_id=folder)
    first, second = tensors(folder), objects(folder)
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    with pytest.raises(CorruptCheckpointError):
        hpdcp.load({"a": 0, "b": torch.zeros(2)}, checkpoint_id=folder)


def test_every_flipped_data_byte_is_found_with_verify_always(folder: Path) -> None:
    path = tensors(folder)
    sound = path.read_bytes()
    start = 8 + int.from_bytes(sound[:8], "little")
    chance = random.Random(3)
    for position in [start, len(sound) - 1, *(chance.randrange(start, len(sound)) for _ in range(12))]:
        flip(path, position, 1 << chance.randrange(8))
        with pytest.raises(CorruptCheckpointError, match="checksum") as caught:
            hpdcp.load(targets(), storage_reader=hpdcp.FileSystemReader(folder, verify="always"))
        assert path.name in str(caught.value)
        path.write_bytes(sound)
    hpdcp.load(targets(), storage_reader=hpdcp.FileSystemReader(folder, verify="always"))


def test_a_flipped_byte_anywhere_in_any_data_file_is_found_by_verify(folder: Path) -> None:
    assert verify_checkpoint(folder).is_sound
    chance = random.Random(11)
    for path in (tensors(folder), objects(folder)):
        sound = path.read_bytes()
        for position in [0, 9, len(sound) - 1, *(chance.randrange(len(sound)) for _ in range(20))]:
            flip(path, position, 1 << chance.randrange(8))
            report = verify_checkpoint(folder)
            assert {damage.key for damage in report.damages} == {path.name}, position
            path.write_bytes(sound)
        path.unlink()
        assert {damage.key for damage in verify_checkpoint(folder).damages} == {path.name}
        path.write_bytes(sound)
    assert verify_checkpoint(folder).is_sound


def test_a_flipped_byte_outside_the_slice_that_is_read_is_found_in_the_blocks_it_touches(folder: Path) -> None:
    """`always` reads the blocks that a slice touches whole: a checksum knows no parts."""
    path = tensors(folder)
    flip(path, path.stat().st_size - 30 - 3 * 7 * 2)
    part = torch.zeros(10)
    info = hpdcp.ChunkInfo(hpdcp.ChunkStorageMetadata((0,), (10,)), (3000,))
    setattr(part, hpdcp.CHUNK_INFO, info)
    hpdcp.load({"w": part}, checkpoint_id=folder)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        hpdcp.load({"w": part}, storage_reader=hpdcp.FileSystemReader(folder, verify="always"))


def test_a_flipped_byte_of_a_python_value_is_always_found(folder: Path) -> None:
    path = objects(folder)
    flip(path, path.stat().st_size - 1, 0x01)
    target = targets()
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        hpdcp.load(target, storage_reader=hpdcp.FileSystemReader(folder, verify="never"))
    assert target["step"] == -7


def test_a_checkpoint_copied_elsewhere_loads(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    target = targets()
    hpdcp.load(target, checkpoint_id=tmp_path / "copy")
    assert target["step"] == 1 and torch.equal(target["w"], state()["w"])


def test_data_without_metadata_is_incomplete_by_name(folder: Path) -> None:
    (folder / METADATA).unlink()
    with pytest.raises(IncompleteCheckpointError, match=rf"{folder} has 2 data files but no \.metadata"):
        hpdcp.load(targets(), checkpoint_id=folder)
    with pytest.raises(FileNotFoundError):
        hpdcp.load(targets(), checkpoint_id=folder)


@pytest.mark.parametrize("content", [None, "user.txt"])
def test_a_folder_without_any_checkpoint_is_not_found_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / content).write_text("mine")
    with pytest.raises(CheckpointNotFoundError, match=str(tmp_path)):
        hpdcp.load(targets(), checkpoint_id=tmp_path)


def test_a_folder_that_is_not_there_is_not_found_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="step_9"):
        hpdcp.load(targets(), checkpoint_id=tmp_path / "step_9")
    assert not (tmp_path / "step_9").exists()


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("a file")
    with pytest.raises(HpdcpError, match="taken"):
        hpdcp.load(targets(), checkpoint_id=path)
    with pytest.raises(HpdcpError, match="taken"):
        hpdcp.save(state(), checkpoint_id=path)
    assert path.read_text() == "a file"


class ReplacingReader(hpdcp.FileSystemReader):
    """Saves another step between the metadata and the data, as many times as it is told."""

    times = 1

    def load_metadata(self) -> hpdcp.Metadata:
        metadata = super().load_metadata()
        if self.times:
            self.times -= 1
            hpdcp.save(state(5.0), checkpoint_id=self.backend.url)
        return metadata


def test_a_checkpoint_replaced_before_anything_was_read_is_loaded_anew_once(folder: Path) -> None:
    reader = ReplacingReader(folder)
    target = targets()
    hpdcp.load(target, storage_reader=reader)
    assert target["step"] == 5 and torch.equal(target["w"], state(5.0)["w"])
    reader.times = 2
    target = targets()
    with pytest.raises(CheckpointReplacedError, match="replaced by another save"):
        hpdcp.load(target, storage_reader=reader)
    assert_untouched(target)
