"""What a user installs: the wheel built from the sdist holds both packages, typed, licensed, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, run_python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a release is: an sdist from the tree, then the wheel from that sdist; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("dist")
    run_python(["-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], timeout=120)
    (path,) = folder.glob("*.whl")
    assert len(list(folder.glob("*.tar.gz"))) == 1
    return path


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_both_packages_are_in_complete_and_nothing_else_is(wheel: Path) -> None:
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(source))
        for source, package in ((ROOT, "hpdcp"), (ROOT / "backends", "hpdcp_backends"))
        for path in (source / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == expected
    assert {"hpdcp/py.typed", "hpdcp_backends/py.typed"} <= found


def test_the_license_and_the_command_are_in(wheel: Path) -> None:
    files = {name.partition(".dist-info/")[2]: data for name, data in contents(wheel).items()}
    assert files["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert "hpdcp = hpdcp.cli:main" in files["entry_points.txt"].decode()
    metadata = message_from_string(files["METADATA"].decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == {"all", "cli", "dev", "hf", "lightning", "npu", "progress", "s3", "zarr", "zstd"}
    pinned = [line for line in metadata.get_all("Requires-Dist", []) if "==" in line.partition(";")[0]]
    assert pinned == [], "a library that pins exact versions cannot be installed beside another one"


def test_the_installed_wheel_imports_from_where_it_was_installed(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
import hpdcp, hpdcp_backends, importlib.metadata, pathlib
for package in (hpdcp, hpdcp_backends):
    assert pathlib.Path({str(site)!r}) in pathlib.Path(package.__file__).parents, package.__file__
assert importlib.metadata.version("hpdcp") == hpdcp.__version__
"""
    # -I: neither the current folder nor PYTHONPATH may answer in the wheel's place.
    run_python(["-I", "-c", code])
