"""One job of four ranks for everything that is broadcast among four."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_what_several_ranks_want_is_read_once_and_broadcast() -> None:
    first = Path(__file__).with_name("dcp_broadcast_load.py")
    run_ranks(4, first, str(first.with_name("dcp_pipeline_load.py")), timeout=240)
