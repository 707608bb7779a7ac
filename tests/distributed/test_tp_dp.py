"""FSDP2 over tensor parallelism with optimizer state, on four ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_models_and_optimizers_resume_under_other_layouts() -> None:
    run_ranks(4, Path(__file__).with_name("_test_dcp_tp_dp.py"), timeout=180)
