"""The S3 server of the tests leaves nothing behind, however the tests end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.ranks import ROOT

_PROGRAM = """
import sys, time
from tests.services import s3
service = s3.S3Service()
print(service.address.url, service.address.ca, service._keeper.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A program that has a server of its own, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_a_server_ends_with_its_owner_though_that_is_killed(owner: subprocess.Popen[str]) -> None:
    url, ca, keeper = read_address(owner)
    family = [psutil.Process(keeper), *psutil.Process(keeper).children(recursive=True)]
    assert len(family) == 2
    assert answers(url)
    owner.send_signal(signal.SIGKILL)
    wait_for(lambda: all(map(has_ended, family)))  # another server may answer there by now
    assert not ca.parent.exists()


def test_a_server_ends_with_its_keeper_though_that_is_killed(owner: subprocess.Popen[str]) -> None:
    _, ca, keeper = read_address(owner)
    (server,) = psutil.Process(keeper).children()
    psutil.Process(keeper).kill()
    wait_for(lambda: has_ended(server))
    # Nobody was left to remove what the server had; the system's own clean-up of temporary files does.
    for path in sorted(ca.parent.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    ca.parent.rmdir()


def test_a_program_that_is_not_there_is_named_with_the_way_to_install_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    # Through the link, the program is looked for beside the link.
    lines = [
        "import sys",
        "from tests.services import s3",
        f"sys.executable = {str(python)!r}",
        "try:",
        "    s3._program()",
        "except s3.ServiceError as error:",
        "    print(error)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "make services" in done.stdout


def read_address(owner: subprocess.Popen[str]) -> tuple[str, Path, int]:
    assert owner.stdout is not None
    url, ca, keeper = owner.stdout.readline().split()
    if ca == "None":
        pytest.skip("openssl is not there, and with it the file by which this test finds the server's folder")
    return url, Path(ca), int(keeper)


def has_ended(process: psutil.Process) -> bool:
    # In a container nobody may collect what is left of a process whose parent is gone.
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def answers(url: str) -> bool:
    where = urlsplit(url)
    assert where.port is not None
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", where.port)) == 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
