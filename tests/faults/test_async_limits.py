"""Saving in the background for as long as one likes takes a handful of descriptors and no more memory."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import forked_python


def test_many_tensors_many_saves_and_forks_stay_within_limits(tmp_path: Path) -> None:
    program = Path(__file__).with_name("async_limits.py")
    output = forked_python(["-W", "error", str(program), str(tmp_path)], timeout=110)
    assert "within limits" in output
    assert "Traceback" not in output
    assert "ResourceWarning" not in output
