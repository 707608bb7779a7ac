"""The NFS backend on a real kernel NFS with two clients: what `tests/nfs` says, run inside a guest."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.background import BackgroundRun

PYTEST = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
FILES = [f"tests/nfs/nfs_{name}.py" for name in ("contract", "freshness", "exchange", "faults")]


# 2 minutes on two free cores, the guest's start among them.
@pytest.mark.in_background("tests/services/nfs_run", "--timeout=600", "--", *PYTEST, *FILES, timeout=620)
def test_the_suite_on_two_nfs_clients_passes(background: BackgroundRun) -> None:
    output = background.output()
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None, output
    assert int(passed[1]) > 150, output
