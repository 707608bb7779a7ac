"""What a call of `async_save` refuses at once, since no worker could save it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import hpdcp
from hpdcp import FileSystemWriter, Metadata, StandardSavePlanner
from hpdcp._base import config
from hpdcp._base.config import BackendSettings
from hpdcp._base.errors import (
    InvalidArgumentError,
    NotSupportedError,
    StateDictError,
)
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.storage import StorageWriter
from hpdcp._plan.write_results import WriteResults
from tests.support.small_saves import SOON, check, state


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    PLANS.clear()
    yield
    assert hpdcp.wait_for_saves(SOON)


class Elsewhere(StorageWriter):
    """A writer without a location."""

    def configure_writer(self, context: PlannerContext) -> None: ...

    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        raise NotImplementedError

    def finalize_checkpoint(self, metadata: Metadata, results: Sequence[WriteResults]) -> Metadata:
        raise NotImplementedError


def test_a_save_without_a_location_is_refused_in_the_call() -> None:
    with pytest.raises(InvalidArgumentError, match="checkpoint_id"):
        hpdcp.async_save(state())
    with pytest.raises(ValueError, match="Elsewhere has none"):
        hpdcp.async_save(state(), storage_writer=Elsewhere())
    with pytest.raises(NotSupportedError, match="takes no checkpoint_id"):
        hpdcp.async_save(state(), storage_writer=Elsewhere(), checkpoint_id="anywhere")


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT"])
def test_gloo_without_an_address_to_meet_at_is_refused_in_the_call(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv(variable)
    with pytest.raises(AssertionError, match=variable):
        hpdcp.async_save(state(), checkpoint_id=tmp_path, use_gloo=True)
    # Where nobody is met, none is needed.
    hpdcp.async_save(state(), checkpoint_id=tmp_path / "a", use_gloo=True, use_collectives=False).get_result(SOON)
    hpdcp.async_save(state(), checkpoint_id=tmp_path / "b", use_gloo=True, no_dist=True).get_result(SOON)


def test_a_state_that_cannot_be_stored_is_refused_in_the_call_and_not_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StateDictError, match="'lock'"), pytest.warns(UserWarning, match="no copier"):
        hpdcp.async_save({"lock": _Unstorable()}, checkpoint_id=tmp_path)
    hpdcp.async_save(state(), checkpoint_id=tmp_path).get_result(SOON)
    check(tmp_path, 1.0)


class _Unstorable:
    def __deepcopy__(self, memo: object) -> _Unstorable:
        return self

    def __reduce__(self) -> str:
        raise TypeError("it stays here")


def test_what_cannot_go_to_the_worker_is_refused_in_the_call(tmp_path: Path) -> None:
    class Local(StandardSavePlanner):
        def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            return super().build_global_plan(plans)

    with pytest.raises(InvalidArgumentError, match=r"planner is a .*Local that cannot be sent"):
        hpdcp.async_save(state(), checkpoint_id=tmp_path, planner=Local())

    class Slow(FileSystemWriter):
        pass

    with pytest.raises(InvalidArgumentError, match="storage_writer is a"):
        hpdcp.async_save(state(), storage_writer=Slow(tmp_path))


def test_a_configuration_that_cannot_be_sent_is_refused_in_the_call(tmp_path: Path) -> None:
    with (
        config.using(backends={"s3": BackendSettings(storage_options={"session": threading.Lock()})}),
        pytest.raises(InvalidArgumentError, match=r"the configuration is a .* cannot be sent"),
    ):
        hpdcp.async_save(state(), checkpoint_id=tmp_path)
