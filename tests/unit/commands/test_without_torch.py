"""What is answered without torch, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpdcp
from tests.support.ranks import run_python

_RUN = """
import sys
from hpdcp.cli import main
try:
    main({arguments!r})
except SystemExit as left:
    assert not left.code, left.code
assert "torch" not in sys.modules, sorted(name for name in sys.modules if name.startswith("hpdcp"))
print("without torch")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["config", "show"],
        *([name, "--help"] for name in ("inspect", "verify", "rm", "diff")),
    ],
)
def test_usage_and_settings_are_told_without_torch(arguments: list[str]) -> None:
    assert "without torch" in run_python(["-c", _RUN.format(arguments=arguments)])


@pytest.mark.parametrize("more", [[], ["--tree"], ["--json"], ["--filter", "model.*"]])
def test_a_checkpoint_is_inspected_without_torch(tmp_path: Path, more: list[str]) -> None:
    hpdcp.save({"model": {"w": torch.ones(3, 4)}, "step": 3}, checkpoint_id=tmp_path / "step_3")
    out = run_python(["-c", _RUN.format(arguments=["inspect", str(tmp_path / "step_3"), *more])])
    assert "model" in out and "float32" in out and "without torch" in out


def test_importing_hpdcp_imports_no_torch() -> None:
    program = "import sys, hpdcp, hpdcp.inspect, hpdcp.config\nprint('torch' in sys.modules)"
    assert run_python(["-c", program]).split() == ["False"]
