"""What a trainer and its worker tell each other of plans, and what is done when they do not fit any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hpdcp
from hpdcp import FileSystemWriter, Metadata, StandardSavePlanner
from hpdcp._background._jobs import Coordination, Job, PlannerSpec, WriterSpec
from hpdcp._background._link import Message
from hpdcp._background.async_save import rows_needed
from hpdcp._background.worker import _published
from hpdcp._base.errors import StateDictError
from hpdcp._comm.identity import attempt_id
from hpdcp._files.folder_save import SaveIdentity, next_ordinal
from hpdcp._plan import replicas
from hpdcp._plan.plan_cache import CachedPlan, PlanCache
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.replicas import check_left_out
from hpdcp._plan.save_plan import SavePlan


def plan_of(state: dict[str, object]) -> tuple[SavePlan, Metadata]:
    planner = StandardSavePlanner()
    planner.configure_planner(state, PlannerContext(0, 1, True, True))
    local = planner.build_local_plan()
    return local, planner.build_global_plan([local])[1]


def job(folder: Path, attempt: str, **fields: object) -> Job:
    arguments: dict[str, object] = {
        "identity": SaveIdentity(attempt, "run", 1),
        "rank": 1,
        "world_size": 2,
        "coordination": Coordination.STORAGE,
        "master": ("", 0),
        "writer": WriterSpec.of(FileSystemWriter(folder)),
        "planner": PlannerSpec.of(StandardSavePlanner()),
        "plan": None,
    }
    return Job(**arguments | fields)  # type: ignore[arg-type]


def test_plans_that_are_not_retained_are_forgotten_and_others_stay() -> None:
    cache = PlanCache()
    for key, plan_id in (("a", 1), ("a", 2), ("b", 1), ("a", 3)):
        cache.put(key, CachedPlan(plan_id, b"", b"", None))
    cache.retain("a", [3, 1, 9])
    assert [plan.plan_id for plan in cache.find("a")] == [3, 1]
    assert [plan.plan_id for plan in cache.find("b")] == [1]
    cache.retain("a", ())
    assert cache.find("a") == []
    assert len(cache) == 1


def test_a_job_arrives_as_it_was_sent(tmp_path: Path) -> None:
    local, _ = plan_of({"big": torch.zeros(1000), "small": torch.zeros(2), "n": [1]})
    needed = rows_needed(local, [], 100)
    sent = job(
        tmp_path,
        "a" * 16,
        plan=local.select(needed),
        rest=local.select(np.setdiff1d(np.arange(len(local)), needed)),
        key="key",
        known=[5, 7],
        cached=[CachedPlan(5, b"local", b"part", b"whole")],
        config=b"",
    )
    facts, payload = sent.to_message()
    got = Job.from_message(Message("job", facts, payload, ()))
    assert got.plan is not None and got.rest is not None
    assert [item.index.fqn for item in got.plan.items] == ["small", "n"]
    assert [item.index.fqn for item in got.rest.items] == ["big"]
    assert got.rest.entries is got.plan.entries
    for name in ("identity", "rank", "world_size", "coordination", "master", "writer", "planner", "key", "known"):
        assert getattr(got, name) == getattr(sent, name), name
    assert list(got.cached) == list(sent.cached)


@pytest.mark.parametrize(("most", "names"), [(None, ["big", "n", "small"]), (100, ["n", "small"]), (-1, [])])
def test_what_is_staged_by_a_plan_is_what_it_writes_and_what_is_compared(most: int | None, names: list[str]) -> None:
    local, _ = plan_of({"big": torch.zeros(1000), "small": torch.zeros(2), "n": [1]})
    assert sorted(local.item(row).index.fqn for row in rows_needed(local, [], most).tolist()) == names
    written = local.select(np.array([local.entries.fqns.find("big")]))
    with_big = [local.item(row).index.fqn for row in rows_needed(local, [written], most).tolist()]
    assert sorted(with_big) == sorted({*names, "big"})


def test_what_others_did_not_plan_either_is_named() -> None:
    local, metadata = plan_of({"a": torch.zeros(4), "b": torch.zeros(4)})
    _, without = plan_of({"a": torch.zeros(4)})
    check_left_out(metadata, [None, local])
    with pytest.raises(StateDictError, match=r"'b' \(rank 1\)") as caught:
        check_left_out(without, [None, local])
    assert "'a'" not in str(caught.value)


def test_what_is_written_in_parts_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SPLIT_BYTES", 64)
    planner = StandardSavePlanner()
    planner.configure_planner({"a": torch.zeros(100)}, PlannerContext(0, 2, True, True))
    local = planner.build_local_plan()
    _, metadata = planner.build_global_plan([local, local])
    assert len(metadata.chunks) == 2
    check_left_out(metadata, [local, local])


def test_a_save_whose_last_word_was_lost_is_known_by_what_was_published(tmp_path: Path) -> None:
    metadata = hpdcp.save({"a": torch.zeros(4)}, checkpoint_id=tmp_path)
    attempt = metadata.settings["attempt"]
    writer = FileSystemWriter(tmp_path)
    found = _published(job(tmp_path, attempt), writer)
    assert found is not None
    assert found.to_bytes() == metadata.to_bytes()
    assert _published(job(tmp_path, "b" * 16), writer) is None
    assert _published(job(tmp_path, attempt, coordination=Coordination.NONE), writer) is None


def test_saves_alone_and_saves_of_all_are_counted_apart() -> None:
    assert [next_ordinal("run of a test", "place", world) for world in (1, 1, 4, 1, 4)] == [1, 2, 1, 3, 2]
    assert attempt_id("place", 1, alone=True) != attempt_id("place", 1, alone=True)
