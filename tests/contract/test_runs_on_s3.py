"""The checkpoints of a run in a bucket: how often it is listed, and what becomes of training while it is away."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hpdcp
from hpdcp import keep
from hpdcp._files.registry import open_backend
from hpdcp._format.file_names import METADATA
from hpdcp._manage._step_facts import StepFacts
from hpdcp._manage.run import Checkpoints
from tests.support.proxy import Answer, Proxy, Rule
from tests.support.s3 import S3Server

STEPS = 1000


def requests(proxy: Proxy, operation: str) -> int:
    return sum(request.operation.startswith(operation) for request in proxy.requests)


def test_a_thousand_steps_are_looked_at_with_few_listings(s3_server: S3Server, s3_proxy: Proxy) -> None:
    place = s3_server.new_prefix()
    options = s3_server.through(s3_proxy).storage_options()
    with Checkpoints(place, asynchronous=False, storage_options=options) as run:
        run.save(STEPS, {"w": torch.ones(4)})
        run.hold(STEPS)
        metadata = hpdcp.FileSystemReader(f"{place}/step_{STEPS:08d}", storage_options=options).load_metadata()
        with open_backend(place, storage_options=s3_server.storage_options()) as backend:

            def put(step: int) -> None:
                facts = StepFacts(step, float(step), "earlier", {"loss": 1 / step}).to_settings()
                data = metadata.with_storage(metadata.storage, facts).to_bytes()
                backend.publish(f"step_{step:08d}/{METADATA}", data)
                # Of a thousand ranks, too: the number of files must not matter.
                for rank in range(3):
                    backend.publish(f"step_{step:08d}/_rank{rank}_.0123456789abcdef.safetensors", b"x")

            with ThreadPoolExecutor(16) as threads:
                list(threads.map(put, range(1, STEPS)))
        s3_proxy.requests.clear()
        records = run.records()
        assert [record.step for record in records if record.is_whole] == list(range(1, STEPS + 1))
        assert records[-1].held
        assert records[9].metrics == {"loss": 0.1}
        assert requests(s3_proxy, "ListObjects") <= 3
        s3_proxy.requests.clear()
        assert run.load_latest({"w": torch.zeros(4)}) == STEPS
        # Of the folders and the marks, of the step's own files, and of the marks once more when it is marked.
        assert requests(s3_proxy, "ListObjects") <= 6
        assert requests(s3_proxy, "HeadObject") <= 4


def test_training_goes_on_while_the_bucket_is_away(
    s3_server: S3Server, s3_proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    options = s3_server.through(s3_proxy).storage_options()
    state = {"w": torch.ones(4)}
    with Checkpoints(
        s3_server.new_prefix(),
        every=1,
        keep=keep.latest(2),
        on_failure="warn",
        max_failures=3,
        storage_options=options,
    ) as run:
        for step in range(1, 8):
            assert run.due(step)
            if step == 3:
                s3_proxy.add(Rule(Answer(403, "AccessDenied"), "PutObject", times=None))
            if step == 6:
                s3_proxy.rules.clear()
            run.save(step, state)
            run.wait()
        warnings = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
        assert [message.partition(":")[0] for message in warnings] == [f"step {n} was not saved" for n in (3, 4, 5)]
        assert all("AccessDenied" in message for message in warnings)
        assert run.steps() == [6, 7]
        assert run.load_latest(state, verify=True) == 7


def test_superfluous_steps_leave_nothing_in_the_bucket(s3_environment: S3Server) -> None:
    place = s3_environment.new_prefix()
    with Checkpoints(place, asynchronous=False, keep=keep.latest(1) | keep.best("loss", lowest=True)) as run:
        for step, loss in ((1, 0.3), (2, 0.1), (3, 0.2), (4, 0.9)):
            run.save(step, {"w": torch.ones(4), "n": step}, metrics={"loss": loss})
    assert {key.partition("/")[0] for key in s3_environment.objects(place)} == {"step_00000002", "step_00000004"}
