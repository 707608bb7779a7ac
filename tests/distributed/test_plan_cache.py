"""Plans used again, by four ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_four_ranks_use_a_plan_again_together_or_not_at_all() -> None:
    run_ranks(4, Path(__file__).with_name("dcp_plan_cache_minimal_api.py"), timeout=180)
