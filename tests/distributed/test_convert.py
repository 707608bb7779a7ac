"""Conversions by four ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_four_ranks_convert_together() -> None:
    run_ranks(4, Path(__file__).with_name("dcp_convert.py"), timeout=300)
