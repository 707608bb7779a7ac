"""Any layout to any other, on four ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_any_layout_loads_under_any_other() -> None:
    run_ranks(4, Path(__file__).with_name("dcp_resharding_api.py"), timeout=240)
