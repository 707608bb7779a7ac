"""Saves and loads in the zarr layout by four ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks

HERE = Path(__file__).parent


def test_four_ranks_save_arrays_and_load_them(tmp_path: Path) -> None:
    run_ranks(4, str(HERE / "dcp_zarr.py"), environment={"HPDCP_TEST_FOLDER": str(tmp_path)}, timeout=420)
