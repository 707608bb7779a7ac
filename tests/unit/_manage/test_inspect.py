"""What a report says of a checkpoint, and what verifying one finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hpdcp
from hpdcp._base.errors import CheckpointExistsError, CheckpointNotFoundError, IncompleteCheckpointError
from hpdcp._format.checksums import BLOCK_BYTES
from hpdcp._format.columns import EntryKind
from hpdcp._format.file_names import METADATA, mailbox_folder
from hpdcp._manage.inspect import inspect_checkpoint
from hpdcp._manage.remove import remove_checkpoint
from hpdcp._manage.verify import verify_checkpoint
from tests.support.data_files import data_file, without_attempt
from tests.support.runs import begin_run

WHOLE = (6, 4)


def chunk(rows: slice) -> torch.Tensor:
    """Some rows of a tensor of `WHOLE`, as a plain tensor that says so."""
    tensor = torch.arange(24.0).reshape(WHOLE)[rows].clone()
    box = hpdcp.ChunkStorageMetadata((rows.start, 0), tuple(tensor.shape))
    setattr(tensor, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(box, WHOLE))
    return tensor


@pytest.fixture
def saved_by_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two ranks that saved each for itself, played one after the other."""
    monkeypatch.setenv("HPDCP_RUN_ID", "test-run")
    store = dist.HashStore()
    for rank in range(2):
        begin_run()
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        try:
            state = {
                "w": chunk(slice(4 * rank, 4 + 2 * rank)),
                "seed": hpdcp.PerRank(rank),
                "bias": torch.ones(3),
            }
            hpdcp.save(state, checkpoint_id=tmp_path, use_collectives=False)
        finally:
            dist.destroy_process_group()
    return tmp_path


def test_a_save_by_each_rank_is_shown_as_one(saved_by_two: Path) -> None:
    report = inspect_checkpoint(saved_by_two)
    assert (report.by_rank, report.world_size) == (True, 2)
    assert report.run.startswith("test-run")
    (w,) = [entry for entry in report.tensors if entry.fqn == "w"]
    assert (w.shape, w.chunks, w.nbytes) == (WHOLE, 2, 96)
    assert without_attempt(w.files) == ["_rank0_.safetensors", "_rank1_.safetensors"]
    assert [(entry.fqn, entry.owner) for entry in report.per_rank] == [("seed", 0), ("seed", 1)]
    assert report.metadata_bytes == sum((saved_by_two / f"{rank}.metadata").stat().st_size for rank in range(2))
    assert sum(file.chunks for file in report.files) == sum(entry.chunks for entry in report.entries)


def test_a_save_by_each_rank_is_verified_as_one(saved_by_two: Path) -> None:
    assert verify_checkpoint(saved_by_two).is_sound
    file = data_file(saved_by_two, 1)
    damage(file, -1)
    (found,) = verify_checkpoint(saved_by_two).damages
    assert found.key == file.name


def test_an_incomplete_set_of_ranks_is_refused(saved_by_two: Path) -> None:
    (saved_by_two / "1.metadata").unlink()
    with pytest.raises(IncompleteCheckpointError):
        inspect_checkpoint(saved_by_two)


def test_no_data_file_is_needed_to_inspect(saved: Path) -> None:
    for file in saved.glob("_rank*"):
        file.unlink()
    report = inspect_checkpoint(saved, pattern="la*")
    assert [(entry.fqn, entry.kind, entry.nbytes) for entry in report.entries] == [
        ("large", EntryKind.TENSOR, BLOCK_BYTES * 2 + 8)
    ]
    assert len(report.files) == 2


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tensor of three blocks, small ones, an empty one and a value."""
    torch.manual_seed(1)
    state = {
        "large": torch.randint(0, 255, (BLOCK_BYTES * 2 + 8,), dtype=torch.uint8),
        "small": torch.randn(3, 5),
        "none": torch.zeros(0, 4),
        "note": {"text": "hello"},
    }
    hpdcp.save(state, checkpoint_id=tmp_path)
    return tmp_path


def damage(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x40
    file.write_bytes(data)


def test_a_sound_checkpoint_is_read_whole(saved: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = verify_checkpoint(saved, on_progress=lambda done, total: calls.append((done, total)))
    assert report.is_sound
    assert report.blocks == 3 + 1 + 1
    metadata = inspect_checkpoint(saved)
    assert report.nbytes == metadata.nbytes
    assert calls[-1] == (metadata.nbytes, metadata.nbytes)


def test_every_flipped_byte_of_a_small_file_is_found(tmp_path: Path) -> None:
    hpdcp.save({"a": torch.randn(3), "b": 12345}, checkpoint_id=tmp_path)
    for suffix in (".safetensors", ".bytes"):
        file = data_file(tmp_path, 0, suffix)
        sound = file.read_bytes()
        for position in (0, 9, 200, 4095, len(sound) - 5, len(sound) - 1):
            damage(file, position)
            assert not verify_checkpoint(tmp_path).is_sound, (suffix, position)
            file.write_bytes(sound)


def test_the_damaged_block_is_named(saved: Path) -> None:
    entry = {block.fqn: block for block in inspect_checkpoint(saved).entries}["large"]
    data_start = (saved / entry.files[0]).stat().st_size - inspect_checkpoint(saved, pattern="[ls]*").nbytes
    small = inspect_checkpoint(saved, pattern="small").nbytes
    damage(saved / entry.files[0], data_start + small + BLOCK_BYTES + 17)
    (found,) = verify_checkpoint(saved).damages
    assert (found.fqn, found.length) == ("large", BLOCK_BYTES)
    assert found.offset == data_start + small + BLOCK_BYTES


def cut(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1)


def lengthen(file: Path) -> None:
    with file.open("ab") as handle:
        handle.write(b"x")


@pytest.mark.parametrize(
    ("harm", "problem"),
    [(Path.unlink, "is missing"), (cut, "recorded were"), (lengthen, "recorded were")],
    ids=["lost", "cut off", "too long"],
)
def test_a_file_of_another_length_is_damaged(saved: Path, harm: Callable[[Path], None], problem: str) -> None:
    file = data_file(saved)
    harm(file)
    report = verify_checkpoint(saved)
    assert any(problem in found.problem and found.key == file.name for found in report.damages)
    assert {found.key for found in report.damages} == {file.name}


def test_another_saves_file_in_its_place_is_found(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    state = {
        "large": torch.zeros(BLOCK_BYTES * 2 + 8, dtype=torch.uint8),
        "small": torch.zeros(3, 5),
        "none": torch.zeros(0, 4),
    }
    hpdcp.save(state, checkpoint_id=other)
    data_file(other).replace(data_file(saved))
    assert "another save's" in verify_checkpoint(saved).damages[0].problem


def test_files_of_unfinished_saves_are_listed_and_harm_nothing(saved: Path) -> None:
    (saved / "_rank0_.0123456789abcdef.safetensors").write_bytes(b"left over")
    (saved / "3.metadata").write_bytes(b"left over")
    (saved / "README.txt").write_text("mine")
    report = verify_checkpoint(saved)
    assert report.is_sound
    assert report.orphans == ("3.metadata", "_rank0_.0123456789abcdef.safetensors")


def test_messages_of_a_killed_save_are_told_of_and_removed(saved: Path) -> None:
    """Also where it was killed before it leased the folder, so that no lease names it."""
    mailbox = saved / mailbox_folder("00000000deadbeef")
    mailbox.mkdir()
    (mailbox / "0000.LOCAL_PLAN_1").write_bytes(b"hpdcpmsg and more")
    (saved / ".mailbox-of-mine").mkdir()
    (saved / ".mailbox-of-mine" / "letter").write_bytes(b"x")
    assert verify_checkpoint(saved).orphans == (f"{mailbox.name}/0000.LOCAL_PLAN_1",)
    with pytest.raises(CheckpointExistsError, match="may be in progress"):
        remove_checkpoint(saved)
    remove_checkpoint(saved, force=True)
    assert [path.name for path in saved.iterdir()] == [".mailbox-of-mine"]


def test_files_kept_for_readers_of_the_replaced_checkpoint_are_no_orphans(saved: Path) -> None:
    with hpdcp.config.using(keep_replaced_for=3600):
        hpdcp.save({"small": torch.zeros(2)}, checkpoint_id=saved)
    assert len(list(saved.glob("_rank*"))) == 3
    assert (saved / METADATA).exists()
    assert verify_checkpoint(saved).orphans == ()
