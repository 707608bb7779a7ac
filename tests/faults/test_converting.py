"""Conversions that are killed leave the old result, the new one or none, whole, and run again."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.ranks import forked_python


def test_conversions_killed_at_any_moment_leave_the_old_result_or_the_new_one_or_none(tmp_path: Path) -> None:
    seed = 1 if os.environ.get("CI") else int.from_bytes(os.urandom(4), "little")
    script = Path(__file__).with_name("kill_conversions.py")
    print(seed, forked_python(["-W", "error", str(script), str(tmp_path), "12", str(seed)], timeout=110))
