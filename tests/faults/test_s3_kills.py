"""Savers and servers that are killed in the midst of a save to S3: the old checkpoint or the new one loads, whole."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import hpdcp
from hpdcp._base.errors import HpdcpError
from hpdcp._files import commit, leftovers
from tests.faults.s3_faults import check_sound, loaded_step, settings, state
from tests.services import s3
from tests.support.proxy import Do, Proxy, Rule, proxied
from tests.support.ranks import ROOT
from tests.support.s3 import S3Server

DATA = r"_rank0_.*\.safetensors"


@pytest.fixture
def saver(s3_server: S3Server, s3_proxy: Proxy) -> Iterator[subprocess.Popen[str]]:
    """The program that saves in children, by way of the proxy."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.s3_killed_saves"],
        cwd=ROOT,
        env=os.environ
        | s3_server.through(s3_proxy).environment()
        | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}",
            "HPDCP_BACKENDS__S3__PART_BYTES": "5MiB",
            "HPDCP_BACKENDS__S3__PUT_BELOW": "5MiB",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_a_save_killed_at_any_stage_leaves_the_old_or_the_new_step(
    s3_server: S3Server, s3_proxy: Proxy, saver: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3_server.new_prefix()
    stages = {
        "before its data": (Rule(Do(print), "CreateMultipartUpload", DATA), False),
        "in the first parts": (Rule(Do(print), "UploadPart", DATA), False),
        "in the midst of its data": (Rule(Do(print), "UploadPart", DATA, skip=1), False),
        "at the end of its data": (Rule(Do(print), "CompleteMultipartUpload", DATA), False),
        "at the commit": (Rule(Do(print), "PutObject", r"/\.metadata$"), True),
        "at the clean-up": (Rule(Do(print), None, "^(DELETE|POST .*delete)"), True),
    }
    with hpdcp.config.using(**settings(s3_server)):
        hpdcp.save(state(1), checkpoint_id=url)
        committed = 1
        for step, (stage, (rule, may_be_new)) in enumerate(stages.items(), start=2):
            children: queue.SimpleQueue[int] = queue.SimpleQueue()
            # The request waits until the child is dead; what has arrived of it may still go through.
            rule.fault = Do(lambda children=children: os.kill(children.get(timeout=30), signal.SIGKILL))  # type: ignore[misc]
            s3_proxy.reset()
            s3_proxy.add(rule)
            assert save_in_child(saver, step, url, children) == -signal.SIGKILL, stage
            assert rule.hits == 1, stage
            loaded = loaded_step(url)
            assert loaded in ((committed, step) if may_be_new else (committed,)), stage
            committed = loaded
        assert s3_server.open_uploads(url)
        # As if a day had passed: until then a writer might only be slow.
        monkeypatch.setattr(commit, "SILENT_SECONDS", -1)
        monkeypatch.setattr(leftovers, "SILENT_SECONDS", -1)
        metadata = hpdcp.save(state(100), checkpoint_id=url)
        assert loaded_step(url) == 100
        check_sound(s3_server, url, metadata)


def save_in_child(saver: subprocess.Popen[str], step: int, url: str, children: queue.SimpleQueue[int]) -> int:
    assert saver.stdin is not None
    assert saver.stdout is not None
    print(step, url, file=saver.stdin, flush=True)
    children.put(int(saver.stdout.readline()))
    return int(saver.stdout.readline())


@pytest.fixture
def own() -> Iterator[s3.S3Service]:
    """A server that nobody minds losing."""
    with s3.running() as service:
        yield service


def test_a_server_killed_and_started_again_in_the_midst_of_a_save_is_waited_for(own: s3.S3Service) -> None:
    server = S3Server.at(own.address)
    url = server.new_prefix()
    starting: list[threading.Thread] = []

    def restart() -> None:
        own.kill()
        starting.append(threading.Thread(target=own.start))
        starting[0].start()

    with proxied(server.url) as proxy:
        with hpdcp.config.using(**settings(server)):
            hpdcp.save(state(1), checkpoint_id=url)
        with hpdcp.config.using(**settings(server.through(proxy), patient=True)):
            rule = proxy.add(Rule(Do(restart), "UploadPart", DATA, skip=1))
            metadata = hpdcp.save(state(2), checkpoint_id=url)
            starting[0].join()
            assert rule.hits == 1
            assert loaded_step(url) == 2
            check_sound(server, url, metadata)


def test_a_server_that_is_gone_raises_and_has_the_previous_step_when_it_is_back(own: s3.S3Service) -> None:
    server = S3Server.at(own.address)
    url = server.new_prefix()
    with proxied(server.url) as proxy, hpdcp.config.using(**settings(server.through(proxy))):
        hpdcp.save(state(1), checkpoint_id=url)
        proxy.add(Rule(Do(own.kill), "UploadPart", DATA, skip=1))
        with pytest.raises(HpdcpError, match="_rank0_"):
            hpdcp.save(state(2), checkpoint_id=url)
        own.start()
        assert loaded_step(url) == 1
        metadata = hpdcp.save(state(3), checkpoint_id=url)
        assert loaded_step(url) == 3
        assert set(metadata.files) <= set(server.objects(url))
