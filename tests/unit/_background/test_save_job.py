"""A job arrives at the worker as it was sent, and its answer at the trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hpdcp
from hpdcp import FileSystemWriter, StandardSavePlanner
from hpdcp._background._messages import Message
from hpdcp._background._sampled import Sampled
from hpdcp._background._save_job import Coordination, SaveAnswer, SaveJob
from hpdcp._background._specs import PlannerSpec, WriterSpec
from hpdcp._background._what_to_stage import rows_needed
from hpdcp._background.worker import published_by
from hpdcp._comm.exchange import Failed
from hpdcp._files.save_identity import SaveIdentity
from hpdcp._format.checksums import checksum
from hpdcp._plan.plan_cache import CachedPlan
from hpdcp._plan.planner import PlannerContext


def job(folder: Path, attempt: str, **fields: object) -> SaveJob:
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
    return SaveJob(**arguments | fields)  # type: ignore[arg-type]


def test_a_job_arrives_as_it_was_sent(tmp_path: Path) -> None:
    planner = StandardSavePlanner()
    planner.configure_planner(
        {"big": torch.zeros(1000), "small": torch.zeros(2), "n": [1]}, PlannerContext(0, 1, True, True)
    )
    local = planner.build_local_plan()
    needed = rows_needed(local, [], local.nbytes <= 100)
    sent = job(
        tmp_path,
        "a" * 16,
        plan=local.select(needed),
        rest=local.select(np.setdiff1d(np.arange(len(local)), needed)),
        sampled=Sampled.of(planner, local.select(np.array([0]))),
        key="key",
        known=[5, 7],
        cached=[CachedPlan(5, b"local", b"part", b"whole")],
    )
    facts, payload = sent.to_message()
    got = SaveJob.from_message(Message("job", facts, payload, ()))
    assert got.plan is not None and got.rest is not None
    assert [item.index.fqn for item in got.plan.items] == ["small", "n"]
    assert [item.index.fqn for item in got.rest.items] == ["big"]
    assert got.rest.entries is got.plan.entries
    assert got.sampled is not None
    assert got.sampled.by_index() == {local.item(0).index: (checksum(bytes(4000)),)}
    for name in ("identity", "rank", "world_size", "coordination", "master", "writer", "planner", "key", "known"):
        assert getattr(got, name) == getattr(sent, name), name
    assert list(got.cached) == list(sent.cached)


@pytest.mark.parametrize(
    "answer",
    [
        SaveAnswer(False, b"metadata", b"plan"),
        SaveAnswer(True, b"metadata"),
        SaveAnswer(True, failed=Failed(2, ("StorageError", "HpdcpError"), "the disk is full", "Traceback")),
    ],
    ids=["saved", "saved without a plan", "failed"],
)
def test_an_answer_arrives_as_it_was_sent(answer: SaveAnswer) -> None:
    assert SaveAnswer.from_message(Message(*answer.to_message(), ())) == answer


def test_a_save_whose_last_message_was_lost_is_known_by_what_was_published(tmp_path: Path) -> None:
    metadata = hpdcp.save({"a": torch.zeros(4)}, checkpoint_id=tmp_path)
    attempt = metadata.settings["attempt"]
    writer = FileSystemWriter(tmp_path)
    found = published_by(job(tmp_path, attempt), writer)
    assert found is not None
    assert found.to_bytes() == metadata.to_bytes()
    assert published_by(job(tmp_path, "b" * 16), writer) is None
    assert published_by(job(tmp_path, attempt, coordination=Coordination.NONE), writer) is None
