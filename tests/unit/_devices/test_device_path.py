"""Runs `on_fake_device.py` in a process of its own, since the device it registers with torch stays for its life."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import forked_python, run_python

NO_OTHER = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""A package that brings devices would take the place of the fake one."""


def test_the_device_path_works_on_a_device_that_is_not_the_cpu() -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/_devices/on_fake_device.py"]
    forked_python(command, timeout=300, environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def test_the_benchmark_of_staging_prints_its_table_on_that_device(tmp_path: Path) -> None:
    arguments = ["--device", "fake", "--gib", "0.005", "--repetitions", "1", "--folder", str(tmp_path / "b")]
    printed = run_python(["benchmarks/device_staging.py", *arguments], timeout=200, environment=NO_OTHER)
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    assert rows == ["figure", "save", "load", "host MiB locked", "device MiB added", "stall, first", "stall, kept"]
    assert not (tmp_path / "b").exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_the_benchmark_of_staging_says_that_there_is_no_accelerator() -> None:
    printed = run_python(["benchmarks/device_staging.py"], expect=2)
    assert "no accelerator" in printed
    assert "nothing was measured" in printed
