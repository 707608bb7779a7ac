"""A real kernel NFS with two clients, in a guest: what `tests/nfs` says there, and ranks on a client each.

The guest takes minutes of one CPU, its start among them; `make test` runs this file beside all the others.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ROOT

_SECONDS = 900
"""For all of it; 4 minutes on a CPU of its own."""


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the guest has left what each part printed, and its exit status."""
    folder = tmp_path_factory.mktemp("guest")
    command = ["tests/services/nfs_run", f"--timeout={_SECONDS}", "--", "tests/nfs/all.sh", str(folder), sys.executable]
    # It ends with this process, however that ends.
    command = ["setpriv", "--pdeathsig", "TERM", *command]
    ran = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    assert ran.returncode == 0, f"the guest ended with {ran.returncode}:\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}"
    return folder


def output(guest: Path, part: str) -> str:
    text = (guest / part).read_text(errors="replace")
    assert (guest / f"{part}.status").read_text() == "0\n", text[-12_000:]
    return text


def test_the_suite_on_two_nfs_clients_passes(guest: Path) -> None:
    text = output(guest, "suite")
    passed = re.search(r"(\d+) passed", text)
    assert passed is not None, text
    assert int(passed[1]) > 150, text


def test_two_ranks_on_two_nfs_clients_save_and_load(guest: Path) -> None:
    assert " passed" in output(guest, "matrix")
