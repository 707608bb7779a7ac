"""One rank fails: every rank raises, naming it and the cause, soon; nothing is published, and the job goes on."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial

import hpdcp
from hpdcp import Metadata, StandardSavePlanner
from hpdcp._base.errors import (
    CorruptCheckpointError,
    HpdcpError,
    IncompleteCheckpointError,
    RankFailedError,
    StorageError,
    UnsupportedTypeError,
)
from hpdcp._plan.save_plan import WriteItem
from hpdcp_backends.local import LocalBackend
from tests.support.data_files import data_file
from tests.support.job import Job
from tests.support.layouts import TP4, differing, local_of, sample_tensors

RANKS = 4

_SOON = 20.0
"""Seconds; the process group's own timeout, which ends a hang, is three times as long."""


@pytest.fixture
def earlier(ranks: Job, folder: Path) -> Path:
    """A folder with a whole checkpoint in it."""
    hpdcp.save({"step": 1, **TP4.place_all(ranks, sample_tensors())}, checkpoint_id=folder)
    return folder


def _fails_on_all(job: Job, action: Callable[[], object], kind: type[HpdcpError]) -> str:
    """The message that every rank's `action` raised, of one class, before long."""
    began = time.monotonic()
    errors = job.errors(action)
    assert time.monotonic() - began < _SOON
    assert [type(error) for error in errors] == [kind] * job.world_size, errors
    texts = {str(error) for error in errors}
    assert len(texts) == 1, texts
    return texts.pop()


def _still_loads(job: Job, folder: Path) -> None:
    """The checkpoint of `earlier`, and beside it nothing that another save left."""
    tensors = sample_tensors()
    targets: dict[str, Any] = {"step": 0, **TP4.blank_all(job, tensors)}
    hpdcp.load(targets, checkpoint_id=folder)
    assert targets.pop("step") == 1
    assert differing(TP4.place_all(job, tensors), targets) == []
    job.barrier()
    listed = Metadata.from_bytes((folder / ".metadata").read_bytes(), where="the earlier save").files
    assert {path.name for path in folder.iterdir()} == {".metadata", ".attempt", *listed}


@pytest.mark.parametrize("value", [threading.Lock(), lambda: None], ids=["a lock", "a lambda"])
def test_a_value_that_cannot_be_stored_on_one_rank(ranks: Job, earlier: Path, value: object) -> None:
    state = {"step": 2, "model": {"odd": value if ranks.rank == 2 else None, "w": torch.zeros(2)}}
    text = _fails_on_all(ranks, lambda: hpdcp.save(state, checkpoint_id=earlier), UnsupportedTypeError)
    assert "rank 2: " in text
    assert "'model.odd'" in text
    _still_loads(ranks, earlier)


def test_values_that_cannot_be_stored_on_two_ranks_are_both_named(ranks: Job, earlier: Path) -> None:
    state = {f"key{ranks.rank}": threading.Lock() if ranks.rank in (1, 3) else 0}
    text = _fails_on_all(ranks, lambda: hpdcp.save(state, checkpoint_id=earlier), UnsupportedTypeError)
    assert "2 of 4 ranks" in text
    assert "rank 1: 'key1'" in text
    assert "rank 3: 'key3'" in text
    _still_loads(ranks, earlier)


def test_a_partial_placement_is_refused_by_name(ranks: Job, earlier: Path) -> None:
    partial = DTensor.from_local(torch.ones(2, device=ranks.device), ranks.mesh(4), [Partial()], run_check=False)
    text = _fails_on_all(ranks, lambda: hpdcp.save({"grad": partial}, checkpoint_id=earlier), UnsupportedTypeError)
    assert "grad" in text
    assert "Reduce it first" in text
    _still_loads(ranks, earlier)


@contextlib.contextmanager
def _no_file_longer_than(length: int) -> Iterator[None]:
    """The kernel refuses this process every byte beyond `length` of a file, as a full quota would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_rank_that_cannot_write_its_file(ranks: Job, earlier: Path) -> None:
    state = {"step": 2, "w": TP4.place(ranks, torch.zeros(4, 100_000))}
    limit = _no_file_longer_than(100_000) if ranks.rank == 1 else contextlib.nullcontext()
    with limit:
        text = _fails_on_all(ranks, lambda: hpdcp.save(state, checkpoint_id=earlier), StorageError)
    assert "rank 1: " in text
    assert "File too large" in text
    assert "_rank1_" in text
    assert str(earlier) in text
    _still_loads(ranks, earlier)


def test_the_first_save_of_a_folder_that_fails_leaves_no_checkpoint(ranks: Job, folder: Path) -> None:
    state = {"w": TP4.place(ranks, torch.zeros(4, 100_000))}
    with _no_file_longer_than(100_000) if ranks.rank == 3 else contextlib.nullcontext():
        _fails_on_all(ranks, lambda: hpdcp.save(state, checkpoint_id=folder), StorageError)
    assert not (folder / ".metadata").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith("_rank")]
    _fails_on_all(ranks, lambda: hpdcp.load(state, checkpoint_id=folder), IncompleteCheckpointError)
    hpdcp.save(state, checkpoint_id=folder)
    target = {"w": TP4.blank_all(ranks, {"w": torch.zeros(4, 100_000)})["w"]}
    hpdcp.load(target, checkpoint_id=folder)
    assert differing(state, target) == []


class _BreaksOnTheThirdRank(StandardSavePlanner):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        return super().get_tensor(item) if self._rank != 3 else torch.zeros(1 // (self._rank - 3))


def test_a_planner_that_raises_while_data_is_written(ranks: Job, earlier: Path) -> None:
    state = {"step": 2, **TP4.place_all(ranks, {"even": torch.zeros(12, 8)})}
    planner = _BreaksOnTheThirdRank(ranks.rank)
    text = _fails_on_all(ranks, lambda: hpdcp.save(state, checkpoint_id=earlier, planner=planner), RankFailedError)
    assert "rank 3: ZeroDivisionError" in text
    _still_loads(ranks, earlier)


def test_a_commit_that_the_coordinator_cannot_make(ranks: Job, earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = LocalBackend.publish

    def refuse(self: LocalBackend, key: str, data: bytes) -> None:
        if key == ".metadata":
            raise StorageError(f"cannot publish {key!r}: no space left")
        publish(self, key, data)

    monkeypatch.setattr(LocalBackend, "publish", refuse)
    text = _fails_on_all(ranks, lambda: hpdcp.save({"step": 2}, checkpoint_id=earlier), StorageError)
    assert "no space left" in text
    monkeypatch.undo()
    _still_loads(ranks, earlier)


def test_a_read_error_on_one_rank(ranks: Job, earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LocalBackend, key: str, *_: object) -> None:
        raise StorageError(f"cannot read {key!r}: the disk is gone")

    targets = TP4.blank_all(ranks, sample_tensors())
    with monkeypatch.context() as patched:
        if ranks.rank == 1:
            patched.setattr(LocalBackend, "read_ranges", broken)
            patched.setattr(LocalBackend, "map_range", broken)
        text = _fails_on_all(ranks, lambda: hpdcp.load(targets, checkpoint_id=earlier), StorageError)
    assert "rank 1: " in text
    assert "the disk is gone" in text
    _still_loads(ranks, earlier)


@pytest.mark.parametrize("damage", ["truncated", "missing", "swapped"])
def test_a_data_file_that_is_not_what_it_was(ranks: Job, earlier: Path, damage: str) -> None:
    file = data_file(earlier, 2)
    ranks.barrier()
    if ranks.rank == 0:
        data = file.read_bytes()
        file.unlink()
        if damage == "truncated":
            file.write_bytes(data[:-4])
        elif damage == "swapped":
            file.write_bytes(data_file(earlier, 1).read_bytes())
    ranks.barrier()
    targets = TP4.blank_all(ranks, sample_tensors())
    text = _fails_on_all(ranks, lambda: hpdcp.load(targets, checkpoint_id=earlier), CorruptCheckpointError)
    assert file.name in text
    assert all(bool((local_of(tensor) == ranks.sentinel()).all()) for tensor in targets.values())


def test_a_damaged_metadata_file(ranks: Job, earlier: Path) -> None:
    if ranks.rank == 0:
        file = earlier / ".metadata"
        file.write_bytes(file.read_bytes()[:-40])
    ranks.barrier()
    targets = {"step": 0}
    text = _fails_on_all(ranks, lambda: hpdcp.load(targets, checkpoint_id=earlier), CorruptCheckpointError)
    assert ".metadata" in text


class _Refuses:
    """Takes no state back on the ranks it is told to refuse on."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"at": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise RuntimeError("this scheduler has another class")


def test_an_object_that_takes_no_state_back_on_one_rank(ranks: Job, folder: Path) -> None:
    hpdcp.save({"scheduler": _Refuses(False)}, checkpoint_id=folder)
    target = {"scheduler": _Refuses(ranks.rank == 0)}
    text = _fails_on_all(ranks, lambda: hpdcp.load(target, checkpoint_id=folder), RankFailedError)
    assert "rank 0: RuntimeError: this scheduler has another class" in text
