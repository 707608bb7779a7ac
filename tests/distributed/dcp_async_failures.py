"""A background save that fails on one of four ranks: the others hear why at once, in the class that its cause has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import PerRank
from hpdcp._base import config
from hpdcp._base.errors import HpdcpError, InvalidArgumentError, StorageError, UnsupportedTypeError, WaitTimeoutError
from hpdcp._plan.plan_cache import PLANS
from tests.support.job import Job
from tests.support.writers import LastWriter, UnmountedWriter

RANKS = 4

MODES: dict[str, dict[str, bool]] = {"gloo": {"use_gloo": True}, "storage": {}}
SOON = 60.0
"""Seconds that a rank waits for its result: more than a worker takes to start, less than `mailbox_timeout`."""


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    PLANS.clear()
    with config.using(mailbox_timeout=600.0):
        yield
    assert hpdcp.wait_for_saves(SOON)
    PLANS.clear()


def state_of(ranks: Job, step: int) -> dict[str, Any]:
    return {"w": torch.full((8,), float(step)), "rng": PerRank([ranks.rank, step])}


def outcome(call: Callable[[], hpdcp.AsyncSaveResponse]) -> tuple[type[BaseException], str]:
    """What the call, or the save that it began, raised; a timeout is no answer."""
    try:
        call().get_result(SOON)
    except WaitTimeoutError:
        raise
    except HpdcpError as error:
        return type(error), str(error)
    pytest.fail("the save succeeded")


def check_next_saves(ranks: Job, folder: Path, mode: str) -> None:
    """The ranks are in step: the next save is one of all of them."""
    for step in (7, 8):
        hpdcp.async_save(state_of(ranks, step), checkpoint_id=folder, **MODES[mode]).get_result(SOON)
        target: dict[str, Any] = {"w": torch.full((8,), ranks.sentinel()), "rng": PerRank(None)}
        hpdcp.load(target, checkpoint_id=folder)
        assert bool((target["w"] == step).all())
        assert target["rng"].value == [ranks.rank, step]
        ranks.barrier()


class Unstorable:
    def __reduce__(self) -> str:
        raise TypeError("not this one")

    def __deepcopy__(self, memo: object) -> Unstorable:
        return self


@pytest.mark.filterwarnings("ignore:.*has no copier")
@pytest.mark.parametrize("mode", MODES)
def test_what_cannot_be_staged_on_one_rank_fails_the_save_on_all(ranks: Job, folder: Path, mode: str) -> None:
    def call() -> hpdcp.AsyncSaveResponse:
        state = state_of(ranks, 1)
        if ranks.rank == 1:
            state["rng"] = PerRank({"odd": Unstorable()})
        return hpdcp.async_save(state, checkpoint_id=folder / "it", **MODES[mode])

    heard = ranks.gather(outcome(call))
    assert [kind for kind, _ in heard] == [UnsupportedTypeError] * RANKS, heard
    assert all("'rng.odd'" in text for _, text in heard), heard
    assert all("rank 1: " in text for rank, (_, text) in enumerate(heard) if rank != 1), heard
    assert not (folder / "it" / ".metadata").exists()
    check_next_saves(ranks, folder / "it", mode)


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_save_to_different_folders_are_told_both(ranks: Job, folder: Path, mode: str, odd: int) -> None:
    mine = folder / ("here" if ranks.rank != odd else "there")
    heard = ranks.gather(outcome(lambda: hpdcp.async_save(state_of(ranks, 1), checkpoint_id=mine, **MODES[mode])))
    assert [kind for kind, _ in heard] == [InvalidArgumentError] * RANKS, heard
    assert all("/here" in text and "/there" in text for _, text in heard), heard
    assert not list(folder.rglob(".metadata"))
    check_next_saves(ranks, folder / "it", mode)


def test_ranks_that_coordinate_in_different_ways_are_told(ranks: Job, folder: Path) -> None:
    heard = ranks.gather(
        outcome(lambda: hpdcp.async_save(state_of(ranks, 1), checkpoint_id=folder / "it", use_gloo=ranks.rank == 2))
    )
    assert [kind for kind, _ in heard] == [InvalidArgumentError] * RANKS, heard
    assert all("use_gloo" in text for _, text in heard), heard
    check_next_saves(ranks, folder / "it", "storage")


class Unsendable(hpdcp.StandardSavePlanner):
    """Holds what no other process can be sent, and plans in a way of its own, so that it has to be."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = (line for line in ())

    def build_global_plan(self, plans: Any) -> Any:
        return super().build_global_plan(plans)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_fails_before_anything_is_staged_is_heard_by_all(ranks: Job, folder: Path, mode: str) -> None:
    planner = Unsendable() if ranks.rank == 2 else None
    heard = ranks.gather(
        outcome(
            lambda: hpdcp.async_save(state_of(ranks, 1), checkpoint_id=folder / "it", planner=planner, **MODES[mode])
        )
    )
    assert [kind for kind, _ in heard] == [heard[2][0]] * RANKS, heard
    assert all("Unsendable" in text for _, text in heard), heard
    assert all("rank 2: " in text for rank, (_, text) in enumerate(heard) if rank != 2), heard
    check_next_saves(ranks, folder / "it", mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_cannot_reach_the_location_fails_the_save_on_all(ranks: Job, folder: Path, mode: str) -> None:
    """Only this rank's: with coordination through that very location, it can tell nobody but its trainer."""
    writer = (UnmountedWriter if ranks.rank == 1 else hpdcp.FileSystemWriter)(folder / "it")
    heard = ranks.gather(outcome(lambda: hpdcp.async_save(state_of(ranks, 1), storage_writer=writer, **MODES[mode])))
    assert [kind for kind, _ in heard] == [StorageError] * RANKS, heard
    assert all("no such mount here" in text for _, text in heard), heard
    assert all("rank 1: " in text for rank, (_, text) in enumerate(heard) if rank != 1), heard
    check_next_saves(ranks, folder / "it", mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_coordinator_that_dies_when_it_has_published_has_saved_for_all(ranks: Job, folder: Path, mode: str) -> None:
    called = threading.Event()
    response = hpdcp.async_save(
        state_of(ranks, 3), storage_writer=LastWriter(folder / "it"), callback=called.set, **MODES[mode]
    )
    metadata = response.get_result(SOON)
    assert called.wait(SOON)
    assert (folder / "it" / ".metadata").read_bytes() == metadata.to_bytes()
    ranks.barrier()
    check_next_saves(ranks, folder / "it", mode)
