"""A model larger than the memory that a conversion may take is converted in it, from near and from far away."""

from __future__ import annotations

import shutil
from pathlib import Path

import crc32c
import pytest

from tests.support.conversion import MARK_EVERY, write_sparse_model
from tests.support.data_files import data_file
from tests.support.ranks import run_python

SHAPES = [(152064, 2048), (4096, 4096), (11008, 4096), (4096, 11008), (30000, 4096)]
"""1.0 GiB of bfloat16, more than half of it in one tensor."""
LIMIT = 512 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    assert write_sparse_model(folder / "hf", SHAPES) > 2 * LIMIT
    return folder


def peak(direction: str, src: Path, dst: Path, backend: str) -> int:
    """Bytes of anonymous memory that the conversion took in a process of its own."""
    output = run_python(["-m", "tests.support.conversion", direction, str(src), str(dst), backend], timeout=240)
    return next(int(line.split()[1]) for line in output.splitlines() if line.startswith("PEAK "))


def checksum(*files: Path) -> int:
    """Of what follows the headers of safetensors files, one file after another."""
    running = 0
    for file in files:
        with file.open("rb") as opened:
            opened.seek(int.from_bytes(opened.read(8), "little"), 1)
            while block := opened.read(MARK_EVERY):
                running = crc32c.crc32c(block, running)
    return running


@pytest.mark.parametrize("backend", ["auto", "counting"], ids=["mapped", "far away"])
def test_memory_stays_bounded_both_ways_whatever_the_size(model: Path, tmp_path: Path, backend: str) -> None:
    expected = checksum(model / "hf" / "model.safetensors")
    assert peak("to-dcp", model / "hf", tmp_path / "dcp", backend) < LIMIT
    assert checksum(data_file(tmp_path / "dcp")) == expected
    assert peak("to-hf", tmp_path / "dcp", tmp_path / "hf", backend) < LIMIT
    assert checksum(*sorted((tmp_path / "hf").glob("*.safetensors"))) == expected
    shutil.rmtree(tmp_path / "hf")
    assert peak("to-torch", tmp_path / "dcp", tmp_path / "all.pt", backend) < LIMIT
    shutil.rmtree(tmp_path / "dcp")
    if backend == "auto":
        assert peak("from-torch", tmp_path / "all.pt", tmp_path / "dcp", backend) < LIMIT
        assert checksum(data_file(tmp_path / "dcp")) == expected
        shutil.rmtree(tmp_path / "dcp")
    (tmp_path / "all.pt").unlink()
