"""Bytes are counted where they leave the store: a slice of a tensor costs its own bytes, not the tensor's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, Metadata
from hpdcp._base.backend import ByteRange
from hpdcp._format.checksums import HEAD_BYTES
from hpdcp_backends.local import LocalBackend

_ROWS, _COLUMNS = 2000, 300
_ROW_BYTES = _COLUMNS * 4


class Reads:
    """Every range of a data file that the backend was asked for."""

    def __init__(self) -> None:
        self.ranges: list[ByteRange] = []

    def add(self, key: str, ranges: Sequence[ByteRange]) -> None:
        # A load looks at the head of each file it uses, to see that it is the one that was committed.
        if key.startswith("_rank"):
            self.ranges += [range_ for range_ in ranges if range_ != ByteRange(0, HEAD_BYTES)]

    @property
    def total(self) -> int:
        return sum(range_.length for range_ in self.ranges)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    seen = Reads()
    read_ranges, map_range = LocalBackend.read_ranges, LocalBackend.map_range

    def counted_read(self: LocalBackend, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        seen.add(key, ranges)
        read_ranges(self, key, ranges, into)

    def counted_map(self: LocalBackend, key: str, range_: ByteRange) -> memoryview | None:
        seen.add(key, [range_])
        return map_range(self, key, range_)

    monkeypatch.setattr(LocalBackend, "read_ranges", counted_read)
    monkeypatch.setattr(LocalBackend, "map_range", counted_map)
    return seen


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.Tensor, Metadata]:
    full = torch.arange(_ROWS * _COLUMNS, dtype=torch.float32).reshape(_ROWS, _COLUMNS)
    metadata = hpdcp.save({"w": full, "other": torch.ones(1000, 1000)}, checkpoint_id=tmp_path)
    return tmp_path, full, metadata


def _chunk(row: int, column: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    target = torch.full((rows, columns), -1, dtype=dtype)
    chunk = ChunkStorageMetadata((row, column), (rows, columns))
    setattr(target, CHUNK_INFO, ChunkInfo(chunk, (_ROWS, _COLUMNS)))
    return target


def test_a_row_slice_reads_exactly_its_rows(saved: tuple[Path, torch.Tensor, Metadata], reads: Reads) -> None:
    folder, full, metadata = saved
    target = _chunk(700, 0, 50, _COLUMNS)
    hpdcp.load({"w": target}, checkpoint_id=folder)
    assert torch.equal(target, full[700:750])
    stored = metadata.storage_info(metadata.chunk_rows(metadata.rows_of("w")[0])[0])
    first = stored.offset + 700 * _ROW_BYTES
    assert reads.total == 50 * _ROW_BYTES
    assert min(range_.offset for range_ in reads.ranges) == first
    assert max(range_.stop for range_ in reads.ranges) == first + 50 * _ROW_BYTES


def test_a_row_slice_that_is_cast_reads_exactly_its_rows(
    saved: tuple[Path, torch.Tensor, Metadata], reads: Reads
) -> None:
    folder, full, _ = saved
    target = _chunk(700, 0, 50, _COLUMNS, dtype=torch.float64)
    with pytest.warns(UserWarning, match="1 tensors are cast"):
        hpdcp.load({"w": target}, checkpoint_id=folder)
    assert torch.equal(target, full[700:750].double())
    assert reads.total == 50 * _ROW_BYTES


def test_a_block_of_rows_and_columns_reads_no_more_than_its_rows(
    saved: tuple[Path, torch.Tensor, Metadata], reads: Reads
) -> None:
    folder, full, _ = saved
    target = _chunk(700, 100, 50, 10)
    hpdcp.load({"w": target}, checkpoint_id=folder)
    assert torch.equal(target, full[700:750, 100:110])
    assert reads.total <= 50 * _ROW_BYTES


def test_all_rows_of_some_columns_read_no_byte_twice(saved: tuple[Path, torch.Tensor, Metadata], reads: Reads) -> None:
    folder, full, _ = saved
    target = _chunk(0, 100, _ROWS, 10)
    hpdcp.load({"w": target}, checkpoint_id=folder)
    assert torch.equal(target, full[:, 100:110])
    assert reads.total <= _ROWS * _ROW_BYTES


def test_a_whole_tensor_is_read_once_and_no_other(saved: tuple[Path, torch.Tensor, Metadata], reads: Reads) -> None:
    folder, full, _ = saved
    target = torch.zeros(_ROWS, _COLUMNS)
    hpdcp.load({"w": target}, checkpoint_id=folder)
    assert torch.equal(target, full)
    assert reads.total == _ROWS * _ROW_BYTES
