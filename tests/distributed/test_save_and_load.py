"""Saves and loads of all kinds of state, under any layout, by four ranks; then what they left, by two and by one."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

HERE = Path(__file__).parent


def test_four_ranks_save_and_load_and_two_and_one_load_what_they_left(tmp_path: Path) -> None:
    """One job for all files: to start four ranks costs as much as most of what they then do."""
    files = ["dcp_save_and_load.py", "dcp_resharding_api.py", "_test_dcp_tp_dp.py"]
    others = HERE / "dcp_other_world_sizes.py"
    environment = {"HPDCP_TEST_FOLDER": str(tmp_path)}
    first, *rest = [*(str(HERE / name) for name in files), f"{others}::test_a_job_saves"]
    run_ranks(4, first, *rest, environment=environment, timeout=420)
    for ranks in (2, 1):
        run_ranks(ranks, others, "-k", "loads", environment=environment)
