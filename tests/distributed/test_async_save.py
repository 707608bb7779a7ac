"""Saves in the background, on four ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_four_ranks_save_in_the_background_in_each_of_the_three_ways() -> None:
    run_ranks(4, Path(__file__).with_name("dcp_async_save.py"), timeout=300)
