"""Ranks that do not wait for one another, and ranks that fail; one job of four for both."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_ranks_that_save_for_themselves_and_ranks_that_fail() -> None:
    apart = Path(__file__).with_name("dcp_without_collectives.py")
    run_ranks(4, apart, str(apart.with_name("dcp_failing_ranks.py")), timeout=180)
