"""The zarr layout keeps every promise of a layout, with and without compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from hpdcp.testing import LayoutContract
from hpdcp_backends._zarr import grid


class TestZarrLayout(LayoutContract):
    layout = "zarr"
    least_files = 4


class TestSmallChunksOfZarr(LayoutContract):
    layout = "zarr"
    least_files = 4

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that small tensors have many chunks, of which some are cut off at the end of the tensor."""
        monkeypatch.setattr(grid, "SMALL_BYTES", 16)
        monkeypatch.setattr(grid, "LARGE_BYTES", 48 << 10)


class TestCompressedZarr(LayoutContract):
    layout = "zarr"
    least_files = 4
    options: ClassVar[Mapping[str, object]] = {"compressor": "zstd", "level": 1}


class TestCompressedWithoutShuffle(TestSmallChunksOfZarr):
    options: ClassVar[Mapping[str, object]] = {"compressor": "zstd", "shuffle": False}
