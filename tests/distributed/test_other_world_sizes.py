"""Four ranks save; two, and then one, load."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_two_ranks_and_one_load_what_four_saved(tmp_path: Path) -> None:
    file = Path(__file__).with_name("dcp_other_world_sizes.py")
    environment = {"HPDCP_TEST_FOLDER": str(tmp_path)}
    run_ranks(4, file, "-k", "job_saves", environment=environment)
    for ranks in (2, 1):
        run_ranks(ranks, file, "-k", "loads", environment=environment)
