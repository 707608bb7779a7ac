"""Nothing in a metadata file can change without a word: a checksum covers all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._base.errors import CorruptCheckpointError, UnsupportedFormatError
from hpdcp._files.block_checker import BlockChecker
from hpdcp._format.checksums import checksum
from hpdcp._format.file_names import METADATA
from hpdcp._format.metadata import Metadata, StorageInfo
from hpdcp_backends.local import LocalBackend


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("saved")
    metadata = hpdcp.save({"w": torch.arange(8.0), "v": torch.ones(2), "n": 1}, checkpoint_id=folder)
    data = (folder / METADATA).read_bytes()
    assert data == metadata.to_bytes()
    return data


def test_every_flipped_bit_is_found(saved: bytes) -> None:
    for position in range(len(saved)):
        damaged = bytearray(saved)
        damaged[position] ^= 1 << position % 8
        with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
            Metadata.from_bytes(bytes(damaged), where=METADATA)


@pytest.mark.parametrize("offset", [1, 7])
def test_what_ranks_are_sent_is_checked_as_well(saved: bytes, offset: int) -> None:
    whole = memoryview(bytes(offset) + saved)[offset:]
    assert Metadata.from_bytes(whole, where="sent").files == Metadata.from_bytes(saved, where=METADATA).files
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        Metadata.from_bytes(memoryview(bytes(damaged)), where="sent")


def test_the_version_cannot_be_turned_back_to_leave_the_checksum_out(saved: bytes) -> None:
    renamed = saved.replace(b'"checksum"', b'"chucksum"')
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        Metadata.from_bytes(renamed, where=METADATA)
    older = re.sub(rb'"version":"1\.\d+"', b'"version":"1.0"', saved)
    assert older != saved
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        Metadata.from_bytes(older, where=METADATA)


def test_a_block_that_two_rows_record_unlike_is_compared_with_both(tmp_path: Path) -> None:
    checker = BlockChecker(LocalBackend(str(tmp_path)), partial_blocks=False)
    data = memoryview(b"twelve bytes")
    checker.check(StorageInfo("file", 0, 12, (checksum(data),)), "w", 0, data)
    with pytest.raises(CorruptCheckpointError, match="'v'"):
        checker.check(StorageInfo("file", 0, 12, (checksum(data) ^ 1,)), "v", 0, data)
