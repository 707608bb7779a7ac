"""Four ranks save; jobs of two ranks, and of one, load what they left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rank_group import RankGroup, started
from tests.support.rank_items import run_test
from tests.support.ranks import ROOT

FILE = "tests/distributed/dcp_other_world_sizes.py"


@pytest.fixture(scope="module")
def left(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that four ranks have saved to."""
    folder = tmp_path_factory.mktemp("left")
    with started(ROOT / FILE, 4, {"HPDCP_TEST_FOLDER": str(folder)}, folder / "ranks") as group:
        run_test(pytestconfig, group, f"{FILE}::test_a_job_saves")
        assert group.end() == []
    return folder


@pytest.fixture(scope="module", params=[2, 1])
def group(request: pytest.FixtureRequest, left: Path) -> Iterator[RankGroup]:
    """Ranks that load from there."""
    with started(
        ROOT / FILE, request.param, {"HPDCP_TEST_FOLDER": str(left)}, left / f"ranks{request.param}"
    ) as loading:
        yield loading


@pytest.mark.parametrize(
    "case",
    [
        "test_another_job_loads",
        "test_another_job_loads_state_of_each_rank_only_as_a_list",
        "test_another_job_loads_what_each_rank_saved_for_itself[True]",
        "test_another_job_loads_what_each_rank_saved_for_itself[False]",
    ],
)
def test_another_number_of_ranks(group: RankGroup, pytestconfig: pytest.Config, case: str) -> None:
    run_test(pytestconfig, group, f"{FILE}::{case}")
