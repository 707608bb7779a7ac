"""A job that torchrun really starts, each rank an interpreter of its own; other tests on ranks fork them."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_four_ranks_save_and_load_a_whole_job() -> None:
    file = Path(__file__).with_name("dcp_save_and_load.py")
    run_ranks(4, file, "-k", "a_whole_job or the_same_metadata")
