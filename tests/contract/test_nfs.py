"""The NFS backend on a real kernel NFS with two clients: what `tests/nfs` says, run inside a guest."""

from __future__ import annotations

import os
import re

import pytest

from tests.support.nfs import UNAVAILABLE, GuestRun


def test_the_suite_on_two_nfs_clients_passes(nfs_suite: GuestRun) -> None:
    status, output = nfs_suite.result()
    if status == UNAVAILABLE and "CI" not in os.environ:
        pytest.skip(f"no NFS can be had on this machine: {output.strip()[-500:]}")
    assert status == 0, output[-12_000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) > 150, output[-2000:]
    print(output[-300:])
