"""Removing a checkpoint removes all of it, and nothing that is not proven to be its own."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import hpdcp
from hpdcp._base.backend import Backend
from hpdcp._base.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    HpdcpError,
    IncompleteCheckpointError,
    StorageError,
    SupersededError,
    UnsupportedFormatError,
)
from hpdcp._comm.mailbox import mailbox_folder, report_dead_worker
from hpdcp._files.commit import Attempt
from hpdcp._files.lease import Holder, Lease
from hpdcp._format.file_names import LEASE, METADATA, rank_lease_key
from hpdcp._format.metadata import Metadata
from hpdcp._format.strings import StringColumn
from hpdcp._manage.remove import Removal, remove_checkpoint
from hpdcp_backends.local import LocalBackend
from tests.support.data_files import data_file, without_attempt
from tests.support.huggingface import write_single
from tests.support.runs import begin_run

DAY = 24 * 3600
STATE = {"w": torch.arange(12.0), "step": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hpdcp.save(STATE, checkpoint_id=tmp_path / "step_3")
    return tmp_path / "step_3"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def aged(folder: Path, seconds: float) -> None:
    """Make everything in the folder that much older, and what the lease says as well."""
    lease = folder / LEASE
    if lease.exists():
        said = json.loads(lease.read_text())
        lease.write_text(json.dumps({**said, "began": said["began"] - seconds}))
    for path in folder.rglob("*"):
        moment = path.stat().st_mtime - seconds
        os.utime(path, (moment, moment))


def test_a_checkpoint_and_its_folder_go(folder: Path) -> None:
    expected = files(folder)
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    removal = remove_checkpoint(folder)
    assert set(removal.keys) == expected
    assert set(without_attempt(expected)) == {METADATA, LEASE, "_rank0_.safetensors", "_rank0_.bytes"}
    assert (removal.nbytes, removal.folder_removed, removal.foreign) == (nbytes, True, ())
    assert not folder.exists()
    with pytest.raises(CheckpointNotFoundError):
        remove_checkpoint(folder)


def test_files_of_others_stay_whatever_they_are_called(folder: Path) -> None:
    theirs = [
        "notes.txt", "_rankings.csv", "_rank0_.mine.safetensors", "_rank7_.safetensors", "1.metadata.bak",
        "_rank0_.0123456789abcdef.safetensors", "deep/_rank0_.safetensors", ".mailbox-0123456789abcdef/0000.RESULT_0",
    ]  # fmt: skip
    for name in theirs:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    removal = remove_checkpoint(folder)
    assert files(folder) == set(theirs)
    assert set(removal.foreign) == {name for name in theirs if "/" not in name}
    assert not removal.folder_removed


def test_a_dry_run_and_a_no_change_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    asked: list[Removal] = []

    def no(planned: Removal) -> bool:
        asked.append(planned)
        return False

    for removal in (remove_checkpoint(folder, dry_run=True), remove_checkpoint(folder, confirm=no)):
        assert removal.dry_run
        assert set(removal.keys) == {path.name for path in before}
    assert len(asked) == 1
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_metadata_goes_first_and_the_lease_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    delete = LocalBackend.delete

    def watched(self: Backend, keys: Iterable[str]) -> None:
        keys = list(keys)
        gone.extend(keys)
        delete(self, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalBackend, "delete", watched)
    remove_checkpoint(folder)
    assert without_attempt(gone) == [METADATA, "_rank0_.bytes", "_rank0_.safetensors", LEASE]


def failing_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Let the store fail from then on."""
    delete, left = LocalBackend.delete, [calls]

    def failing(self: Backend, keys: Iterable[str]) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("the store is gone")
        delete(self, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalBackend, "delete", failing)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_removal_that_was_cut_off_is_finished_by_the_next(
    calls: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_after(patch, calls)
        with pytest.raises(StorageError):
            remove_checkpoint(folder)
    target = {"w": torch.zeros(12), "step": 0}
    if calls:
        with pytest.raises(IncompleteCheckpointError, match="hpdcp rm"):
            hpdcp.load(target, checkpoint_id=folder)
    else:
        hpdcp.load(target, checkpoint_id=folder)
        assert target["step"] == 3
    assert remove_checkpoint(folder).folder_removed


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_save_after_a_removal_that_was_cut_off_is_whole_and_takes_the_rest_along(
    calls: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_after(patch, calls)
        with pytest.raises(StorageError):
            remove_checkpoint(folder)
    hpdcp.save({**STATE, "step": 4}, checkpoint_id=folder)
    target = {"w": torch.zeros(12), "step": 0}
    hpdcp.load(target, checkpoint_id=folder)
    assert target["step"] == 4
    assert len(files(folder)) == 4
    assert remove_checkpoint(folder).folder_removed


def begun(folder: Path, *, attempt: str = "00000000deadbeef") -> Attempt:
    """A save that holds the lease, has written, and not committed."""
    backend = LocalBackend(str(folder))
    started = Attempt.begin(backend, attempt)
    hpdcp.save(STATE, checkpoint_id=folder.parent / "other")
    head = data_file(folder.parent / "other").read_bytes()
    name = f"_rank0_.{attempt}.safetensors"
    old = json.loads((folder.parent / "other" / LEASE).read_text())["attempt"]
    (folder / name).write_bytes(head.replace(old.encode(), attempt.encode()))
    report_dead_worker(backend, attempt, 0)
    return started


@pytest.mark.parametrize("committed", [False, True], ids=["into an empty folder", "over a checkpoint"])
def test_a_save_that_may_be_in_progress_is_left_alone(committed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    if committed:
        hpdcp.save(STATE, checkpoint_id=folder)
    started = begun(folder)
    before = files(folder)
    with pytest.raises(CheckpointExistsError, match=r"00000000deadbeef.*may be in progress.*--force"):
        remove_checkpoint(folder)
    assert files(folder) == before
    removal = remove_checkpoint(folder, force=True)
    assert removal.foreign == ()
    assert not folder.exists()
    metadata = hpdcp.save(STATE, checkpoint_id=tmp_path / "third")
    with pytest.raises(SupersededError):
        started.commit(metadata, keep_replaced_for=0)


def test_what_a_save_left_that_has_been_silent_for_a_day_goes_without_force(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    begun(folder)
    aged(folder, DAY + 60)
    (folder / "notes.txt").write_text("mine")
    removal = remove_checkpoint(folder)
    assert removal.metadata == ()
    assert set(removal.data) == {"_rank0_.00000000deadbeef.safetensors", f"{mailbox_folder('00000000deadbeef')}/DEAD_0"}
    assert files(folder) == {"notes.txt"}


def test_files_that_a_commit_keeps_for_readers_go_too(folder: Path) -> None:
    with hpdcp.config.using(keep_replaced_for=3600):
        hpdcp.save(STATE, checkpoint_id=folder)
    assert len(files(folder)) == 6
    assert remove_checkpoint(folder).folder_removed


def by_two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, *, ranks: Iterable[int] = (0, 1)) -> Path:
    monkeypatch.setenv("HPDCP_RUN_ID", "test")
    store = dist.HashStore()
    for rank in ranks:
        begin_run()
        dist.init_process_group("fake", store=store, rank=rank, world_size=2)
        try:
            hpdcp.save({"seed": hpdcp.PerRank(rank), "w": torch.ones(2)}, checkpoint_id=folder, use_collectives=False)
        finally:
            dist.destroy_process_group()
    return folder


def test_what_ranks_saved_each_for_itself_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = by_two_ranks(tmp_path / "apart", monkeypatch)
    removal = remove_checkpoint(folder)
    assert removal.metadata == ("0.metadata", "1.metadata")
    assert removal.folder_removed


def test_ranks_that_never_published_are_found_by_their_files_own_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = by_two_ranks(tmp_path / "apart", monkeypatch)
    # Rank 1 is in the same save still, as its lease says.
    attempt = Metadata.from_bytes((folder / "1.metadata").read_bytes(), where="").settings["attempt"]
    (folder / "1.metadata").unlink()
    (folder / rank_lease_key(1)).write_bytes(Lease(Holder.beginning(attempt, time.time())).to_bytes())
    with pytest.raises(CheckpointExistsError, match="may be in progress"):
        remove_checkpoint(folder)
    assert remove_checkpoint(folder, force=True).folder_removed
    folder = by_two_ranks(tmp_path / "none", monkeypatch)
    for rank in range(2):
        (folder / f"{rank}.metadata").unlink()
    aged(folder, DAY + 60)
    assert remove_checkpoint(folder).folder_removed


def torch_checkpoint(folder: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)


def weights(folder: Path) -> None:
    write_single(folder, {"w": torch.ones(2)})


def letters(folder: Path) -> None:
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")


def nothing(folder: Path) -> None:
    folder.mkdir()


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (torch_checkpoint, UnsupportedFormatError, "was not written by hpdcp"),
        (weights, CheckpointNotFoundError, "hpdcp did not save"),
        (letters, CheckpointNotFoundError, "none is hpdcp's"),
        (nothing, CheckpointNotFoundError, "empty"),
    ],
)
@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_folder_without_a_checkpoint_is_refused(
    make: Callable[[Path], None], error: type[HpdcpError], says: str, force: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    make(folder)
    before = files(folder)
    with pytest.raises(error, match=says):
        remove_checkpoint(folder, force=force)
    assert files(folder) == before


def test_damaged_metadata_stops_a_removal_unless_it_is_forced(folder: Path) -> None:
    (folder / METADATA).write_bytes(b"\0" * 300)
    (folder / "_rank3_.safetensors").write_text("nobody's")
    with pytest.raises(CorruptCheckpointError, match="Nothing was removed"):
        remove_checkpoint(folder)
    assert len(files(folder)) == 5
    removal = remove_checkpoint(folder, force=True)
    # Python values lie in a file that names its attempt as well.
    assert files(folder) == {"_rank3_.safetensors"} == set(removal.foreign)


def test_a_newer_format_is_refused_even_by_force(folder: Path) -> None:
    data = (folder / METADATA).read_bytes()
    newer = re.sub(rb'"version":"1\.\d+"', b'"version":"9.0"', data)
    assert newer != data
    (folder / METADATA).write_bytes(newer)
    with pytest.raises(UnsupportedFormatError):
        remove_checkpoint(folder, force=True)
    assert len(files(folder)) == 4


@pytest.mark.parametrize("listed", ["notes.txt", "../notes.txt", "/etc/notes.txt", "_rank0_/../../notes.txt", METADATA])
def test_metadata_and_leases_of_a_stranger_cannot_name_a_users_file(listed: str, folder: Path) -> None:
    for place in (folder, folder.parent):
        (place / "notes.txt").write_text("mine")
    list_instead(folder, listed)
    said: dict[str, Any] = json.loads((folder / LEASE).read_text())
    (folder / LEASE).write_text(
        json.dumps({**said, "replaced": [[listed, 0]], "replacing": [listed], "made": [listed]})
    )
    remove_checkpoint(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder.parent / "notes.txt").read_text() == "mine"
    assert set(without_attempt(files(folder))) <= {"notes.txt", "_rank0_.bytes", "_rank0_.safetensors"}


def list_instead(folder: Path, name: str) -> None:
    """Let the metadata name another file in place of the first."""
    metadata = Metadata.from_bytes((folder / METADATA).read_bytes(), where=METADATA)
    names = StringColumn.from_strings([name, *list(metadata.storage.file_names)[1:]])
    forged = metadata.with_storage(replace(metadata.storage, file_names=names), {})
    (folder / METADATA).write_bytes(forged.to_bytes())


def test_files_that_a_layout_puts_into_folders_go_and_what_lies_beside_them_stays(folder: Path) -> None:
    (folder / "w/c/0").mkdir(parents=True)
    for name in ("w/zarr.json", "w/c/0/0", "w/c/0/notes.txt"):
        (folder / name).write_text("x")
    list_instead(folder, "w/c/0/0")
    remove_checkpoint(folder)
    assert files(folder) == {"w/zarr.json", "w/c/0/notes.txt"}, "listed was one file"


def test_what_an_unfinished_save_made_under_fixed_names_goes(folder: Path) -> None:
    begun(folder)
    said: dict[str, Any] = json.loads((folder / LEASE).read_text())
    (folder / LEASE).write_text(json.dumps({**said, "made": ["w"]}))
    (folder / "w/c/0").mkdir(parents=True)
    for name in ("w/zarr.json", "w/c/0/0", "w/notes.txt"):
        (folder / name).write_text("x")
    remove_checkpoint(folder, force=True)
    assert files(folder) == {"w/notes.txt"}


def test_a_save_that_begins_while_one_looks_stops_the_removal(folder: Path) -> None:
    def meanwhile(planned: Removal) -> bool:
        Attempt.begin(LocalBackend(str(folder)), "1111111111111111")
        return True

    with pytest.raises(SupersededError, match="Nothing was removed"):
        remove_checkpoint(folder, confirm=meanwhile)
    target = {"w": torch.zeros(12), "step": 0}
    hpdcp.load(target, checkpoint_id=folder)
    assert target["step"] == 3


def test_a_save_that_was_in_progress_cannot_commit_once_a_removal_has_begun(folder: Path) -> None:
    metadata = hpdcp.FileSystemReader(folder).load_metadata()
    started = Attempt.begin(LocalBackend(str(folder)), "1111111111111111")
    remove_checkpoint(folder, force=True)
    with pytest.raises(SupersededError):
        started.commit(metadata, keep_replaced_for=0)
    assert not (folder / METADATA).exists()


def test_another_backend_and_options_are_taken(folder: Path) -> None:
    assert remove_checkpoint(folder, backend="fsspec", storage_options={"auto_mkdir": True}).keys
    assert not folder.exists()
