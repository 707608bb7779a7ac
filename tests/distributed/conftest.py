"""Under torchrun each test of this folder runs on all ranks at once, and ends with the ranks telling how it went."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.job import Job, job
from tests.support.ranks import is_rank

_JOB = pytest.StashKey[Job]()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Job]:
    """The job that torchrun started."""
    if not is_rank():
        pytest.fail(
            "this file runs on several ranks: python -m torch.distributed.run --nproc-per-node=4 -m pytest FILE"
        )
    with job() as joined:
        request.config.stash[_JOB] = joined
        yield joined


@pytest.fixture
def folder(ranks: Job, tmp_path: Path) -> Iterator[Path]:
    """One empty folder that all ranks see."""
    shared: Path = ranks.share(tmp_path)
    yield shared
    ranks.barrier()
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    joined = item.config.stash.get(_JOB, None)
    if joined is not None:
        joined.enter(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that fails on one rank fails on all, and no rank goes on to the next test before all are through."""
    joined = pyfuncitem.config.stash.get(_JOB, None)
    if joined is None:
        return (yield)
    mine: BaseException | None = None
    try:
        result = yield
    except BaseException as error:  # noqa: BLE001  # skips and failures are raised past Exception
        mine = error
    try:
        outcomes = joined.leave(None if mine is None else f"{type(mine).__name__}: {mine}"[:2000])
    except dist.DistStoreError as error:
        # A rank is lost or stuck: whatever follows could only hang.
        pyfuncitem.session.shouldstop = f"not all ranks finished {pyfuncitem.name}: {error}"
        raise AssertionError(pyfuncitem.session.shouldstop) from mine
    joined.enter(f"{pyfuncitem.nodeid}/teardown")
    if mine is not None:
        raise mine
    others = [f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text is not None]
    if others:
        pytest.fail("failed on other ranks: " + "; ".join(others), pytrace=False)
    return result
