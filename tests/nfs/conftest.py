"""Two clients of one export, over each version of NFS, and a folder of the test's own; see tests/services/nfs_run."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Mounts:
    """One folder as two clients and the server see it."""

    a: Path
    b: Path
    served: Path


@pytest.fixture(params=["4.2", "3"])
def mounts(request: pytest.FixtureRequest) -> Mounts:
    """An empty folder that client A has made and client B has never looked at."""
    suffix = "3" if request.param == "3" else ""
    name = f"test-{os.getpid()}-{next(_numbers)}"
    a, b = (Path(os.environ[f"HPDCP_TEST_NFS_{client}{suffix}"]) / name for client in "AB")
    a.mkdir()
    return Mounts(a, b, Path(os.environ["HPDCP_TEST_NFS_EXPORT"]) / name)


@pytest.fixture
def small() -> Iterator[Path]:
    """An export of 12 MiB in all."""
    root = Path(os.environ["HPDCP_TEST_NFS_SMALL"])
    folder = root / f"test-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)
