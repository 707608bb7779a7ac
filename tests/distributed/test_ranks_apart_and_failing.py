"""Ranks that do not wait for one another, ranks that fail, and plans used again; one job of four for all."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_ranks_that_save_for_themselves_that_fail_and_that_use_a_plan_again() -> None:
    apart = Path(__file__).with_name("dcp_without_collectives.py")
    others = [apart.with_name("dcp_failing_ranks.py"), apart.with_name("dcp_plan_cache_minimal_api.py")]
    run_ranks(4, apart, *map(str, others), timeout=300)
