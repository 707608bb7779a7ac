"""Two jobs that save to one folder: the newer claim wins, the older takes away its own files and says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._base.errors import SupersededError
from hpdcp._format.file_names import LEASE, METADATA
from hpdcp._manage.remove import remove_checkpoint
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.save_plan import SavePlan
from hpdcp_backends.local import LocalBackend


def state(value: float) -> dict[str, object]:
    return {"w": torch.full((64,), value), "step": int(value)}


def loaded(folder: Path) -> int:
    target = state(-1.0)
    hpdcp.load(target, checkpoint_id=folder)
    assert isinstance(target["step"], int) and isinstance(target["w"], torch.Tensor)
    assert torch.equal(target["w"], torch.full((64,), float(target["step"])))
    return target["step"]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Interrupted(hpdcp.StandardSavePlanner):
    """Runs something else when the folder is claimed and nothing is written yet."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        self._meanwhile()
        return super().finalize_plan(plan)


@pytest.mark.parametrize("there_before", [False, True])
def test_the_older_claim_gives_way_and_the_newer_checkpoint_stays_whole(tmp_path: Path, there_before: bool) -> None:
    if there_before:
        hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    winner: list[hpdcp.Metadata] = []
    planner = Interrupted(lambda: winner.append(hpdcp.save(state(2.0), checkpoint_id=tmp_path)))
    with pytest.raises(SupersededError, match="another attempt leased it"):
        hpdcp.save(state(3.0), checkpoint_id=tmp_path, planner=planner)
    assert names(tmp_path) == {METADATA, LEASE, *winner[0].files}
    assert loaded(tmp_path) == 2


def test_a_claim_alone_is_enough_to_stop_the_older_attempt(tmp_path: Path) -> None:
    """The newer attempt has not committed, and never does: the older must not, since the newer believes it is alone."""
    before = hpdcp.save(state(1.0), checkpoint_id=tmp_path)

    class CrashError(Exception):
        pass

    def crash() -> None:
        raise CrashError

    def claim_and_crash() -> None:
        with pytest.raises(CrashError):
            hpdcp.save(state(2.0), checkpoint_id=tmp_path, planner=Interrupted(crash))

    with pytest.raises(SupersededError):
        hpdcp.save(state(3.0), checkpoint_id=tmp_path, planner=Interrupted(claim_and_crash))
    assert names(tmp_path) == {METADATA, LEASE, *before.files}
    assert loaded(tmp_path) == 1
    hpdcp.save(state(4.0), checkpoint_id=tmp_path)
    assert loaded(tmp_path) == 4


def test_of_two_saves_that_commit_at_the_same_moment_one_says_that_it_published_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one begins and commits, all of it, after the older has looked for others and before it publishes."""
    outcomes: dict[int, object] = {}

    def save(value: int) -> None:
        try:
            outcomes[value] = hpdcp.save(state(float(value)), checkpoint_id=tmp_path)
        except SupersededError as error:
            outcomes[value] = error

    hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    publish = LocalBackend.publish
    newer = threading.Thread(target=save, args=(3,))

    def publish_late(backend: LocalBackend, key: str, data: bytes) -> None:
        if key == METADATA and newer.ident is None:
            newer.start()
            newer.join(timeout=1)
        publish(backend, key, data)

    monkeypatch.setattr(LocalBackend, "publish", publish_late)
    save(2)
    newer.join(timeout=60)
    [winner] = [value for value, outcome in outcomes.items() if isinstance(outcome, hpdcp.Metadata)]
    assert len(outcomes) == 2
    assert loaded(tmp_path) == winner
    hpdcp.save(state(4.0), checkpoint_id=tmp_path)
    assert len(names(tmp_path)) == 4


def test_a_commit_by_somebody_who_did_not_claim_stops_the_attempt(tmp_path: Path) -> None:
    """Such as a checkpoint that is copied into the folder while a save runs."""
    hpdcp.save(state(1.0), checkpoint_id=tmp_path / "a")
    hpdcp.save(state(5.0), checkpoint_id=tmp_path / "b")

    def copy() -> None:
        for path in (tmp_path / "b").iterdir():
            if path.name != LEASE:
                (tmp_path / "a" / path.name).write_bytes(path.read_bytes())

    with pytest.raises(SupersededError, match="committed there"):
        hpdcp.save(state(3.0), checkpoint_id=tmp_path / "a", planner=Interrupted(copy))
    assert loaded(tmp_path / "a") == 5


def test_two_attempts_that_find_an_empty_folder_never_share_a_file(tmp_path: Path) -> None:
    older: list[BaseException] = []

    def begin_second() -> None:
        (tmp_path / LEASE).unlink()
        with pytest.raises(SupersededError) as caught:
            hpdcp.save(state(2.0), checkpoint_id=tmp_path, planner=Interrupted(begin_third))
        older.append(caught.value)

    def begin_third() -> None:
        (tmp_path / LEASE).unlink()
        hpdcp.save(state(3.0), checkpoint_id=tmp_path)

    with pytest.raises(SupersededError):
        hpdcp.save(state(1.0), checkpoint_id=tmp_path, planner=Interrupted(begin_second))
    assert len(older) == 1
    assert loaded(tmp_path) == 3
    assert len(names(tmp_path)) == 4


def test_a_save_that_wakes_up_after_its_folder_was_removed_and_saved_again_touches_nothing(tmp_path: Path) -> None:
    """Its files and its successor's may not have one name: it would remove committed ones as its own."""
    folder = tmp_path / "step"

    def meanwhile() -> None:
        remove_checkpoint(folder, force=True)
        hpdcp.save(state(2.0), checkpoint_id=folder)

    with pytest.raises(SupersededError):
        hpdcp.save(state(1.0), checkpoint_id=folder, planner=Interrupted(meanwhile))
    assert loaded(folder) == 2
    assert len(names(folder)) == 4


def test_a_save_whose_lease_is_gone_publishes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "step"

    def meanwhile() -> None:
        remove_checkpoint(folder, force=True)
        folder.mkdir()

    with pytest.raises(SupersededError, match="its lease went"):
        hpdcp.save(state(1.0), checkpoint_id=folder, planner=Interrupted(meanwhile))
    assert names(folder) == set()


@pytest.mark.parametrize("no_dist", [False, True])
def test_a_reader_between_two_saves_meets_the_files_it_knows_or_none(tmp_path: Path, no_dist: bool) -> None:
    folder = tmp_path / "step"
    hpdcp.save(state(1.0), checkpoint_id=folder, no_dist=no_dist)
    target = state(-1.0)

    class Late(hpdcp.StandardLoadPlanner):
        def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
            remove_checkpoint(folder, force=True)
            hpdcp.save(state(2.0), checkpoint_id=folder, no_dist=no_dist)
            return super().finalize_plan(plan)

    with pytest.raises(hpdcp.errors.CheckpointReplacedError):
        hpdcp.load(target, checkpoint_id=folder, planner=Late(), no_dist=no_dist)
