"""Saves in the background, by four ranks that train on meanwhile."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

import hpdcp
from hpdcp import AsyncSaveResponse, PerRank
from hpdcp._base import config
from hpdcp._base.errors import (
    PeerLostError,
    ReplicaMismatchError,
    StateDictError,
    WaitTimeoutError,
    WorkerDiedError,
)
from hpdcp._format.file_names import mailbox_folder
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.save_plan import WriteItem
from tests.support.job import Job
from tests.support.layouts import DP2_TP2, FSDP4, HSDP, RAGGED, TP4_COLUMNS, Layout, differing, local_of
from tests.support.planners import ToldPlanner
from tests.support.workers import kill_worker, workers_of

RANKS = 4

MODES: dict[str, dict[str, bool]] = {
    "gloo": {"use_gloo": True},
    "storage": {},
    "apart": {"use_collectives": False},
}
TOGETHER = ("gloo", "storage")
FULL = {"w": torch.arange(96.0).reshape(12, 8), "norm": torch.arange(8.0)}
SOON = 60.0
"""Seconds, on a busy machine, for what should take less than one; a worker's start is most of it."""


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    PLANS.clear()
    with config.using(mailbox_timeout=SOON):
        yield
    assert hpdcp.wait_for_saves(SOON)
    PLANS.clear()


def state_of(job: Job, layout: Layout = HSDP, scale: float = 1.0) -> dict[str, Any]:
    return {
        "model": layout.place_all(job, {"w": FULL["w"] * scale}),
        "norm": FULL["norm"] * scale,
        "history": {"steps": [scale]},
        "rng": PerRank({"seed": torch.full((4,), job.rank + scale), "at": [job.rank, scale]}),
    }


def spoil(state: dict[str, Any]) -> None:
    """What training does to a state, and more."""
    for tensor in (state["model"]["w"], state["norm"], state["rng"].value["seed"]):
        local_of(tensor).fill_(-7.0)
    state["history"]["steps"].append("later")
    state["rng"].value["at"].clear()


def check(job: Job, folder: Path, scale: float, layout: Layout = TP4_COLUMNS) -> None:
    """Load under another layout and compare all of it."""
    target: dict[str, Any] = {
        "model": layout.blank_all(job, {"w": FULL["w"]}),
        "norm": torch.full((8,), job.sentinel()),
        "history": None,
        "rng": PerRank({"seed": torch.full((4,), job.sentinel()), "at": None}),
    }
    hpdcp.load(target, checkpoint_id=folder)
    assert differing(layout.place_all(job, {"w": FULL["w"] * scale}), target["model"]) == []
    assert torch.equal(target["norm"], FULL["norm"] * scale)
    assert target["history"] == {"steps": [scale]}
    assert torch.equal(target["rng"].value["seed"], torch.full((4,), job.rank + scale))
    assert target["rng"].value["at"] == [job.rank, scale]


def landed(job: Job, response: AsyncSaveResponse) -> None:
    """Return once the save is published on all ranks; one that failed fails the test on all."""
    errors = job.errors(lambda: response.get_result(SOON))
    failed = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in enumerate(errors) if error is not None]
    if failed:
        pytest.fail("\n".join(failed))


def test_dcp_async_save_twice_reuses_the_plan_cache(ranks: Job, folder: Path, tmp_path: Path) -> None:
    for mode in TOGETHER:
        PLANS.clear()
        planner = ToldPlanner(tmp_path / f"{mode}.log")
        for turn in (1, 2, 3):
            state = state_of(ranks, scale=float(turn))
            response = hpdcp.async_save(state, checkpoint_id=folder / f"{mode}{turn}", planner=planner, **MODES[mode])
            spoil(state)
            landed(ranks, response)
        # Each rank of its own plans once in the trainer; the coordinator's worker plans once for all.
        assert planner.told() == ["local"] + ["global"] * (ranks.rank == 0)
        assert len(PLANS) == 1
        for turn in (1, 2, 3):
            check(ranks, folder / f"{mode}{turn}", float(turn))


@pytest.mark.parametrize("mode", MODES)
def test_the_state_may_be_changed_the_moment_the_call_returns(ranks: Job, folder: Path, mode: str) -> None:
    for turn, layout in enumerate((HSDP, FSDP4, RAGGED), start=1):
        state = state_of(ranks, layout, scale=float(turn))
        response = hpdcp.async_save(state, checkpoint_id=folder / str(turn), **MODES[mode])
        spoil(state)
        landed(ranks, response)
        for target in (TP4_COLUMNS, DP2_TP2):
            check(ranks, folder / str(turn), float(turn), target)


@pytest.mark.parametrize("mode", MODES)
def test_the_result_is_the_metadata_that_a_load_finds(ranks: Job, folder: Path, mode: str) -> None:
    response = hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "it", **MODES[mode])
    metadata = response.get_result(SOON)
    assert response.done()
    assert response.persist_completion.result(0) is metadata
    name = ".metadata" if mode != "apart" else f"{ranks.rank}.metadata"
    assert (folder / "it" / name).read_bytes() == metadata.to_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_the_callback_runs_once_and_only_after_the_checkpoint_is_there(
    ranks: Job, folder: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = ".metadata" if mode != "apart" else f"{ranks.rank}.metadata"
    seen: list[bool] = []
    called = threading.Event()

    def note() -> None:
        seen.append((folder / "one" / name).exists())
        called.set()
        raise RuntimeError("the dashboard is down")

    landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "one", callback=note, **MODES[mode]))
    assert called.wait(SOON)
    landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "two", **MODES[mode]))
    assert seen == [True]
    assert "the dashboard is down" in caplog.text


def test_a_callback_is_not_called_when_the_save_fails(ranks: Job, folder: Path) -> None:
    seen: list[int] = []
    state = {"norm": FULL["norm"] + ranks.rank}
    response = hpdcp.async_save(state, checkpoint_id=folder / "it", callback=lambda: seen.append(1))
    errors = ranks.errors(lambda: response.get_result(SOON))
    assert [type(error) for error in errors] == [ReplicaMismatchError] * 4
    assert "norm" in str(errors[0])
    assert hpdcp.wait_for_saves(SOON)
    assert seen == []
    assert not (folder / "it" / ".metadata").exists()


@pytest.mark.parametrize("mode", MODES)
def test_every_checkpoint_of_a_model_in_training_holds_exactly_its_step(ranks: Job, folder: Path, mode: str) -> None:
    torch.manual_seed(3)
    mesh = ranks.mesh(4)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 33), torch.nn.Tanh())
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "loss": 0.0}
    kept: list[tuple[AsyncSaveResponse, dict[str, Any]]] = []
    for step in range(5):
        # The trainer's own collectives: FSDP's, and an all-reduce, while the save before is on its way.
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        state["loss"] = float(total)
        response = hpdcp.async_save(state, checkpoint_id=folder / str(step), **MODES[mode])
        now = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": state["loss"]}
        kept.append((response, tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, now)))
    for step, (response, expected) in enumerate(kept):
        landed(ranks, response)
        blank = tree_map(lambda x: torch.full_like(x, -1) if isinstance(x, torch.Tensor) else None, expected)
        hpdcp.load(blank, checkpoint_id=folder / str(step))
        assert blank["loss"] == expected["loss"]
        assert blank["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
        for part in (lambda s: s["model"], *_states(expected)):
            assert differing(part(expected), part(blank)) == []


def _states(state: dict[str, Any]) -> list[Callable[[dict[str, Any]], dict[str, torch.Tensor]]]:
    return [lambda s, key=key: s["optimizer"]["state"][key] for key in state["optimizer"]["state"]]


@pytest.mark.parametrize("mode", TOGETHER)
def test_either_kind_of_save_hits_the_plan_that_the_other_made(
    ranks: Job, folder: Path, tmp_path: Path, mode: str
) -> None:
    planner = ToldPlanner(tmp_path / "log")
    landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "1", planner=planner, **MODES[mode]))
    told = planner.told()
    hpdcp.save(state_of(ranks, scale=2.0), checkpoint_id=folder / "2", planner=planner)
    assert planner.told() == told
    check(ranks, folder / "2", 2.0)

    PLANS.clear()
    hpdcp.save(state_of(ranks, scale=3.0), checkpoint_id=folder / "3", planner=planner)
    told = planner.told()
    state = state_of(ranks, scale=4.0)
    response = hpdcp.async_save(state, checkpoint_id=folder / "4", planner=planner, **MODES[mode])
    spoil(state)
    landed(ranks, response)
    assert planner.told() == told
    check(ranks, folder / "4", 4.0)


@pytest.mark.parametrize("mode", TOGETHER)
def test_ranks_whose_caches_fell_apart_plan_again_and_hit_after_that(
    ranks: Job, folder: Path, tmp_path: Path, mode: str
) -> None:
    planner = ToldPlanner(tmp_path / "log")

    def save(scale: float) -> int:
        before = len(planner.told())
        state = state_of(ranks, scale=scale)
        response = hpdcp.async_save(state, checkpoint_id=folder / str(scale), planner=planner, **MODES[mode])
        spoil(state)
        landed(ranks, response)
        check(ranks, folder / str(scale), scale)
        return len(planner.told()) - before

    save(1.0)
    if ranks.rank == 1:
        PLANS.clear()
    save(2.0)
    save(3.0)
    assert ranks.gather(save(4.0)) == [0] * 4
    assert ranks.gather(save(5.0)) == [0] * 4


def _ports_beside_the_masters_taken(job: Job) -> ExitStack:
    taken = ExitStack()
    if job.rank == 0:
        master = int(os.environ["MASTER_PORT"])
        for port in (*range(master - 4, master), *range(master + 1, master + 9)):
            probe = taken.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
                probe.listen(1)
            except OSError:
                continue  # somebody else's already, which serves as well
    job.barrier()
    return taken


@pytest.mark.parametrize("mode", TOGETHER)
def test_a_worker_killed_in_the_middle_fails_the_save_on_all_ranks_soon_and_is_replaced(
    ranks: Job, folder: Path, tmp_path: Path, mode: str
) -> None:
    """The new one starts from its trainer's plans; with gloo, all meet in another group."""
    planner = ToldPlanner(tmp_path / "log")
    landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "it", planner=planner, **MODES[mode]))
    told = planner.told()
    if ranks.rank == 2:
        workers_of()[0].send_signal(signal.SIGSTOP)
    ranks.barrier()
    lost = state_of(ranks, scale=2.0)
    response = hpdcp.async_save(lost, checkpoint_id=folder / "it", planner=planner, **MODES[mode])
    with pytest.raises(WaitTimeoutError, match="goes on"):
        response.get_result(0.2)
    assert not response.done()
    assert not hpdcp.wait_for_saves(0.01)
    ranks.barrier()
    if ranks.rank == 2:
        kill_worker()
    errors = ranks.errors(lambda: response.get_result(SOON))
    expected: list[type] = [PeerLostError, PeerLostError, WorkerDiedError, PeerLostError]
    assert [type(error) for error in errors] == expected, errors
    assert "signal 9" in str(errors[2])
    ranks.barrier()
    check(ranks, folder / "it", 1.0)
    state = state_of(ranks, scale=3.0)
    with _ports_beside_the_masters_taken(ranks):
        response = hpdcp.async_save(state, checkpoint_id=folder / "it", planner=planner, **MODES[mode])
        spoil(state)
        landed(ranks, response)
    check(ranks, folder / "it", 3.0)
    assert planner.told() == told
    ranks.barrier()
    assert _mailboxes(folder / "it") == []


def test_a_save_goes_on_after_a_wait_that_took_too_long(ranks: Job, folder: Path) -> None:
    hpdcp.start_async_worker()
    if ranks.rank == 3:
        workers_of()[0].send_signal(signal.SIGSTOP)
    ranks.barrier()
    response = hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "it")
    try:
        with pytest.raises(WaitTimeoutError):
            response.get_result(0.3)
    finally:
        ranks.barrier()
        if ranks.rank == 3:
            workers_of()[0].send_signal(signal.SIGCONT)
    landed(ranks, response)
    check(ranks, folder / "it", 1.0)


@pytest.mark.parametrize("mode", TOGETHER)
def test_a_failure_that_nobody_asked_about_raises_in_the_next_call(ranks: Job, folder: Path, mode: str) -> None:
    hpdcp.async_save({"norm": FULL["norm"] + ranks.rank}, checkpoint_id=folder / "it", **MODES[mode])
    errors = ranks.errors(lambda: hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "next", **MODES[mode]))
    assert [type(error) for error in errors] == [ReplicaMismatchError] * 4, errors
    ranks.barrier()
    assert not (folder / "next").exists()
    ranks.barrier()
    landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "next", **MODES[mode]))
    check(ranks, folder / "next", 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_saves_back_to_back_land_one_after_the_other(
    ranks: Job, folder: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hpdcp")
    states = {name: state_of(ranks, scale=scale) for name, scale in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    responses = []
    for name, state in states.items():
        responses.append(hpdcp.async_save(state, checkpoint_id=folder / name, **MODES[mode]))
        spoil(state)
    assert responses[0].done() and responses[1].done()
    for response in responses:
        landed(ranks, response)
    for name, scale in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        check(ranks, folder / name, scale)


def test_saves_alternate_between_the_three_ways_and_replace_one_another(ranks: Job, folder: Path) -> None:
    for turn, mode in enumerate(("storage", "gloo", "storage", "gloo"), start=1):
        landed(ranks, hpdcp.async_save(state_of(ranks, scale=float(turn)), checkpoint_id=folder / "it", **MODES[mode]))
        check(ranks, folder / "it", float(turn))
        landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / f"{turn}", **MODES["apart"]))
        check(ranks, folder / f"{turn}", 1.0)
    ranks.barrier()
    assert _mailboxes(folder / "it") == []


def test_a_save_of_one_rank_alone_does_not_put_the_others_out_of_step(ranks: Job, folder: Path) -> None:
    if ranks.rank == 1:
        alone = {"w": FULL["w"].clone()}
        hpdcp.async_save(alone, checkpoint_id=folder / "it", no_dist=True).get_result(SOON)
        (folder / "it" / "0.metadata").unlink()
    ranks.barrier()
    landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "it"))
    check(ranks, folder / "it", 1.0)
    for turn in (2.0, 3.0):
        state = state_of(ranks, scale=turn)
        landed(ranks, hpdcp.async_save(state, checkpoint_id=folder / "apart", use_collectives=False))
        check(ranks, folder / "apart", turn)
        ranks.barrier()


def test_messages_of_a_crashed_attempt_are_never_read_and_go_with_the_next_save(ranks: Job, folder: Path) -> None:
    landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "it"))
    crashed = folder / "it" / mailbox_folder("0123456789abcdef")
    if ranks.rank == 0:
        claim = (folder / "it" / ".attempt").read_bytes()
        mine = claim.split(b'"attempt": "')[1][:16]
        (folder / "it" / ".attempt").write_bytes(claim.replace(mine, b"0123456789abcdef"))
        crashed.mkdir()
        for kind in ("STATUS", "LOCAL_PLAN", "STORAGE_DATA"):
            for rank in range(4):
                (crashed / f"0000.{kind}_{rank}").write_bytes(b"of another attempt")
        (crashed / "DEAD_2").write_bytes(b"")
    ranks.barrier()
    landed(ranks, hpdcp.async_save(state_of(ranks, scale=2.0), checkpoint_id=folder / "it"))
    check(ranks, folder / "it", 2.0)
    ranks.barrier()
    assert _mailboxes(folder / "it") == []


def _mailboxes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(mailbox_folder("*")))


@pytest.mark.parametrize("mode", MODES)
def test_states_beyond_the_budget_go_in_waves(ranks: Job, folder: Path, mode: str) -> None:
    """Of some ranks only: the others have staged all at once and left the call."""
    with config.using(async_staging_budget=64 if ranks.rank % 2 else 1 << 30, check_replicas="all"):
        for turn in (1.0, 2.0):
            state = state_of(ranks, scale=turn)
            response = hpdcp.async_save(state, checkpoint_id=folder / str(turn), **MODES[mode])
            spoil(state)
            landed(ranks, response)
            check(ranks, folder / str(turn), turn)


class BreakingPlanner(hpdcp.StandardSavePlanner):
    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        raise RuntimeError("the device fell off the bus")


@pytest.mark.parametrize("mode", TOGETHER)
def test_a_failure_between_waves_of_one_rank_is_heard_by_all(ranks: Job, folder: Path, mode: str) -> None:
    planner = BreakingPlanner() if ranks.rank == 1 else None
    with config.using(async_staging_budget=64):
        errors = ranks.errors(
            lambda: hpdcp.async_save(
                state_of(ranks), checkpoint_id=folder / "it", planner=planner, **MODES[mode]
            ).get_result(SOON)
        )
    assert all("fell off the bus" in str(error) for error in errors), errors
    ranks.barrier()
    assert not (folder / "it" / ".metadata").exists()
    assert hpdcp.wait_for_saves(SOON)
    landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "it", **MODES[mode]))


def test_gloo_without_a_master_is_refused(ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("MASTER_ADDR")
        with pytest.raises(AssertionError, match="MASTER_ADDR"):
            hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "it", use_gloo=True)
    landed(ranks, hpdcp.async_save(state_of(ranks), checkpoint_id=folder / "it", use_gloo=True))


@pytest.mark.parametrize("mode", TOGETHER)
def test_what_a_rank_alone_gives_up_is_never_published_as_a_hole(ranks: Job, folder: Path, mode: str) -> None:
    """The others count on that rank's part by an earlier plan and have not staged their copies."""
    with config.using(check_replicas="off"):
        first = hpdcp.async_save({"big": FULL["w"].clone()}, checkpoint_id=folder / "it", **MODES[mode])
        landed(ranks, first)
        (file,) = first.get_result().files
        writer = int(file.removeprefix("_rank").split("_")[0])
        state = {"big": FULL["w"] * 2} if ranks.rank != writer else {}
        second = hpdcp.async_save(state, checkpoint_id=folder / "it", **MODES[mode])
        errors = ranks.errors(lambda: second.get_result(SOON))
        assert [type(error) for error in errors] == [StateDictError] * 4, errors
        assert "'big'" in str(errors[0])
        landed(ranks, hpdcp.async_save(state, checkpoint_id=folder / "it", **MODES[mode]))
    target = {"big": torch.full((12, 8), ranks.sentinel())}
    hpdcp.load(target, checkpoint_id=folder / "it")
    assert torch.equal(target["big"], FULL["w"] * 2)
