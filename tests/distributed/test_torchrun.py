"""Jobs that torchrun really starts, each rank an interpreter of its own; other tests on ranks fork them."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

HERE = Path(__file__).parent


def test_four_ranks_save_and_load_a_whole_job() -> None:
    run_ranks(4, HERE / "dcp_save_and_load.py", "-k", "a_whole_job or the_same_metadata")


def test_four_ranks_save_and_two_and_one_load_what_they_left(tmp_path: Path) -> None:
    file = HERE / "dcp_other_world_sizes.py"
    environment = {"HPDCP_TEST_FOLDER": str(tmp_path)}
    run_ranks(4, f"{file}::test_a_job_saves", environment=environment)
    for ranks in (2, 1):
        run_ranks(ranks, file, "-k", "loads", environment=environment)
