"""Pipeline stages on eight ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_pipeline_stages_load_their_parts() -> None:
    run_ranks(8, Path(__file__).with_name("dcp_pp_stage_load.py"), timeout=240)
