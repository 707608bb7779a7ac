"""One job of ranks per store, for everything that ranks do together."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

MATRIX = Path(__file__).with_name("dcp_stores.py")


def test_four_ranks_on_a_folder(tmp_path: Path) -> None:
    environment = {"HPDCP_TEST_STORE_URL": str(tmp_path), "HPDCP_TEST_STORE_BROADCASTS": "0"}
    run_ranks(4, MATRIX, environment=environment, timeout=180)
