"""Hugging Face folders, by four ranks."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import run_ranks


def test_four_ranks_fill_sharded_models_from_hugging_face_folders() -> None:
    run_ranks(4, Path(__file__).with_name("dcp_huggingface.py"), timeout=240)
