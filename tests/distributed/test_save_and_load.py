"""All kinds of state, by four ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_four_ranks_save_and_load_all_kinds_of_state() -> None:
    run_ranks(4, Path(__file__).with_name("dcp_save_and_load.py"), timeout=180)
