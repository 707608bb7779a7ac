"""The checkpoints of a run, on four ranks: what one rank notices or finds, all of them act on."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import hpdcp
from hpdcp import PerRank, keep
from hpdcp._base import config
from hpdcp._base.errors import HpdcpError, InvalidArgumentError, RankFailedError, StorageError
from hpdcp._format.file_names import METADATA
from hpdcp._manage.run import Checkpoints
from hpdcp_backends.local import LocalBackend
from tests.support.job import Job
from tests.support.layouts import local_of
from tests.support.workers import kill_worker

RANKS = 4
TOTAL = 14


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    with config.using(mailbox_timeout=20.0):
        yield


class Training:
    """A small job whose every step depends on the one before, and on a random generator that each rank has its own of.

    Args:
        step: called after each step with its number, before the run is asked whether it is due.
    """

    def __init__(self, job: Job, step: Callable[[int], object] = lambda step: None) -> None:
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        mesh = job.mesh(4)
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.noise = torch.Generator().manual_seed(job.rank)
        self._step = step

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "noise": PerRank(self.noise.get_state())}

    def resume(self, run: Checkpoints) -> int:
        latest = run.latest()
        if latest is None:
            return 0
        hpdcp.allocate_optimizer_state(self.optimizer, checkpoint_id=f"{run.location}/step_{latest:08d}")
        state = self.state()
        step = run.load_latest(state)
        assert step is not None
        self.noise.set_state(state["noise"].value)
        return step

    def train(self, run: Checkpoints, total: int = TOTAL) -> int:
        """Train until the total, or until the run stops; the last step that was done."""
        step = self.resume(run)
        while step < total and not run.stopping:
            step += 1
            loss = self.model(torch.randn(8, 16, generator=self.noise)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._step(step)
            if run.due(step):
                run.save(step, self.state(), metrics={"loss": loss.detach()})
        return step

    def weights(self) -> list[torch.Tensor]:
        return [local_of(each.detach()).clone() for each in self.model.parameters()]


def test_a_signal_to_any_rank_has_all_save_the_same_step_and_the_resumed_run_is_the_uninterrupted_one(
    ranks: Job, folder: Path
) -> None:
    with Checkpoints(folder / "uninterrupted", signals=()) as run:
        whole = Training(ranks)
        assert whole.train(run) == TOTAL
        assert run.steps() == []
    seed = ranks.share(random.randrange(1 << 30))
    choice = random.Random(seed)
    for turn, interval in enumerate((1, 3)):
        victim, moment = choice.randrange(4), choice.randint(1, 9)
        place = folder / str(turn)

        def preempt(step: int, victim: int = victim, moment: int = moment) -> None:
            if step == moment and ranks.rank == victim:
                os.kill(os.getpid(), signal.SIGTERM)

        with Checkpoints(place, every=4, keep=keep.latest(2), signal_interval=interval) as run:
            stopped = Training(ranks, preempt).train(run)
            assert run.stopping
        told = f"seed {seed}: SIGTERM to rank {victim} in step {moment}, interval {interval}"
        assert set(ranks.gather(stopped)) == {stopped}, told
        assert moment <= stopped < moment + interval, told
        with Checkpoints(place, every=4, keep=keep.latest(2), signal_interval=interval) as run:
            assert run.latest() == stopped, told
            resumed = Training(ranks)
            assert resumed.train(run) == TOTAL
        for mine, theirs in zip(whole.weights(), resumed.weights(), strict=True):
            assert torch.equal(mine, theirs), told


def test_all_ranks_are_told_what_rank_0_finds(ranks: Job, folder: Path) -> None:
    listed: list[str] = []
    list_folders = LocalBackend.list_folders

    def counted(self: LocalBackend) -> list[str]:
        listed.append(self.url)
        return list_folders(self)

    with pytest.MonkeyPatch.context() as patch, Checkpoints(folder / "run", asynchronous=False) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": torch.full((4,), float(step))}, metrics={"loss": ranks.rank}, user=ranks.rank)
        patch.setattr(LocalBackend, "list_folders", counted)
        assert (run.steps(), run.latest(), run.best("loss")) == ([1, 2, 3], 3, 3)
        assert [(record.metrics, record.user, record.ranks) for record in run.records()] == [({"loss": 0.0}, 0, 4)] * 3
        run.hold(1)
        assert [record.held for record in run.records()] == [True, False, False]
        with pytest.raises(HpdcpError, match="is held"):
            run.remove(1)
        run.release(1)
        run.remove(1)
        assert run.steps() == [2, 3]
        assert bool(listed) == (ranks.rank == 0)
        if ranks.rank == 0:
            next((folder / "run/step_00000003").glob("_rank*")).unlink()
        ranks.barrier()
        state = {"w": torch.zeros(4)}
        assert run.load_latest(state) == 2
        assert state["w"].tolist() == [2.0] * 4


def test_each_rank_verifies_a_part_and_all_go_further_back(ranks: Job, folder: Path) -> None:
    with Checkpoints(folder / "run", asynchronous=False) as run:
        for step in (1, 2):
            state = {"w": PerRank(torch.full((4,), float(step)))}
            run.save(step, state)
        if ranks.rank == 0:
            damaged = next((folder / "run/step_00000002").glob("_rank3_*.safetensors"))
            data = bytearray(damaged.read_bytes())
            data[-1] ^= 1
            damaged.write_bytes(data)
        ranks.barrier()
        state = {"w": PerRank(torch.zeros(4))}
        assert run.load_latest(state, verify=True) == 1
        assert state["w"].value.tolist() == [1.0] * 4


def test_ranks_at_different_steps_are_told_so_and_do_not_hang(ranks: Job, folder: Path) -> None:
    with Checkpoints(folder / "run", signal_interval=1) as run:
        with pytest.raises(InvalidArgumentError, match="step 7 on one rank and for step 8 on another"):
            run.due(7 if ranks.rank else 8)
        with pytest.raises(InvalidArgumentError, match="one rank saves step 7 and another step 8"):
            run.save(7 if ranks.rank else 8, {})
        assert run.steps() == []


def test_time_is_measured_by_rank_0(ranks: Job, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        now = [1000.0 * ranks.rank]
        patch.setattr("hpdcp._manage._schedule.time.monotonic", lambda: now[0])
        with Checkpoints(folder / "run", every=timedelta(seconds=20), signal_interval=2, signals=()) as run:
            due = []
            for step in range(1, 11):
                now[0] += 7 * (1 + ranks.rank)
                if run.due(step):
                    due.append(step)
                    run.save(step, {"w": torch.ones(1)})
            assert due == [4, 8]


def test_a_lost_worker_is_one_failure_on_all_ranks_and_training_goes_on(ranks: Job, folder: Path) -> None:
    state = {"w": torch.ones(4)}
    with Checkpoints(folder / "run", on_failure="warn", max_failures=1) as run:
        run.save(1, state).get_result(60)
        run.save(2, state)
        if ranks.rank == 2:
            kill_worker()
        run.save(3, state).get_result(60)
        run.wait()
        assert run.steps() in ([1, 3], [1, 2, 3])
    assert set(ranks.gather(tuple(Checkpoints(folder / "run", signals=()).steps()))) in ({(1, 3)}, {(1, 2, 3)})


def test_too_many_failures_are_raised_on_every_rank(ranks: Job, folder: Path) -> None:
    publish = LocalBackend.publish

    def fail(self: LocalBackend, key: str, data: bytes) -> None:
        if key == METADATA:
            raise StorageError("the store is away")
        publish(self, key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalBackend, "publish", fail)
        run = Checkpoints(folder / "run", asynchronous=False, on_failure="warn", max_failures=2)
        for step in (1, 2, 3):
            run.save(step, {"w": torch.ones(1)})
        with pytest.raises(StorageError, match="away"):
            run.save(4, {"w": torch.ones(1)})
        assert run.steps() == []
        run.close()


def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks: Job, folder: Path) -> None:
    with Checkpoints(folder / "run", asynchronous=False) as run:
        with pytest.raises((InvalidArgumentError, RankFailedError)):
            run.save(1, {"w": torch.ones(1)}, metrics={"loss": "low" if ranks.rank == 1 else 0.5})
        run.save(2, {"w": torch.ones(1)})
        assert run.steps() == [2]
