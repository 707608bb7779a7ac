"""All items of a plan read at once, compared with slicing what was stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._base.errors import CorruptCheckpointError, HpdcpError
from hpdcp._files import run_reads
from hpdcp._files.block_checker import BlockChecker
from hpdcp._files.run_reads import read_tensors
from hpdcp._format.columns import ChunkTable, Entry, EntryKind, EntryTable
from hpdcp._format.metadata import Metadata, MetadataIndex, StorageTable
from hpdcp._format.strings import StringColumn
from hpdcp._plan.load_plan import LoadPlan, PlannedItems, ReadItem
from hpdcp._state.dtypes import dtype_name
from hpdcp._state.geometry import Box
from tests.unit._files.test_read_engine import KEY, MemoryBackend, bits, blocks_of, chunks_and_boxes, make_target

_DTYPES = [torch.float32, torch.int16, torch.bfloat16, torch.bool, torch.complex64]


class LocalMemory(MemoryBackend):
    remote = False


@dataclass(frozen=True)
class _Chunk:
    values: torch.Tensor
    boxes: list[Box]


def _stored(values: Sequence[torch.Tensor]) -> tuple[Metadata, bytes]:
    """One file that holds them one after another, each the only chunk of a tensor."""
    raw = [bits(value) for value in values]
    ends = np.cumsum([len(each) for each in raw], dtype=np.int64)
    crcs = [blocks_of(each) for each in raw]
    entries = [
        Entry(f"w{number}", f'["w{number}"]', EntryKind.TENSOR, dtype_name(value.dtype), tuple(value.shape))
        for number, value in enumerate(values)
    ]
    storage = StorageTable(
        np.zeros(len(raw), np.int32),
        ends - [len(each) for each in raw],
        np.array([len(each) for each in raw], np.int64),
        np.cumsum([len(each) for each in crcs], dtype=np.int64),
        np.array([crc for each in crcs for crc in each], np.uint32),
        StringColumn.from_strings([KEY]),
        ends[-1:],
        np.zeros(1, np.uint32),
    )
    whole = [((0,) * value.ndim, tuple(value.shape)) for value in values]
    table = ChunkTable.from_boxes(range(len(values)), whole)
    return Metadata(EntryTable.from_entries(entries), table, storage), b"".join(raw)


def _items(boxes: Sequence[tuple[int, Box]]) -> PlannedItems:
    items = [
        ReadItem(MetadataIndex(f"w{row}", box.offsets, box.sizes), row, (0,) * box.ndim, box.offsets, box.sizes)
        for row, box in boxes
    ]
    return LoadPlan.build(items).planned


@st.composite
def _chunks(draw: st.DrawFn) -> list[_Chunk]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        sizes, boxes = draw(chunks_and_boxes())
        dtype = draw(st.sampled_from(_DTYPES))
        values = torch.arange(math.prod(sizes)).reshape(sizes).to(dtype)
        found.append(_Chunk(values, [Box.whole(sizes), *boxes]))
    return found


@settings(max_examples=200, deadline=None)
@given(_chunks(), st.booleans(), st.sampled_from([None, False, True]), st.data())
def test_every_box_gets_what_slicing_gives(
    chunks: list[_Chunk], remote: bool, partial_blocks: bool | None, data: st.DataObject
) -> None:
    metadata, raw = _stored([chunk.values for chunk in chunks])
    # Empty boxes may begin after the end of the last chunk.
    backend = (MemoryBackend if remote else LocalMemory)(raw + bytes(1 << 15), maps=data.draw(st.booleans()))
    boxes = [(row, box) for row, chunk in enumerate(chunks) for box in chunk.boxes]
    kinds = st.sampled_from(["plain", "plain", "reversed", "stepped", "inner"])
    targets = [make_target(box.sizes, chunks[row].values.dtype, data.draw(kinds)) for row, box in boxes]
    checker = None if partial_blocks is None else BlockChecker(backend, partial_blocks=partial_blocks)
    read_tensors(backend, metadata, _items(boxes), targets, checker)
    for (row, box), target in zip(boxes, targets, strict=True):
        cut = tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
        assert bits(target) == bits(chunks[row].values[cut])


@pytest.mark.parametrize("remote", [False, True])
def test_many_are_asked_for_in_the_order_of_the_file_and_some_at_a_time(
    remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reads, "_RANGES_AT_ONCE", 7)
    monkeypatch.setattr(run_reads, "_RANGES_AT_ONCE_HERE", 7)
    monkeypatch.setattr(run_reads, "CONCURRENT_WINDOWS", 1)
    values = [torch.full((4,), float(number)) for number in range(40)]
    metadata, raw = _stored(values)
    backend = (MemoryBackend if remote else LocalMemory)(raw, maps=False)
    calls: list[int] = []
    read_ranges = backend.read_ranges
    monkeypatch.setattr(backend, "read_ranges", lambda *args: (calls.append(len(args[1])), read_ranges(*args)))
    order = [(number * 7) % 40 for number in range(40)]
    targets = [torch.zeros(4) for _ in order]
    read_tensors(backend, metadata, _items([(row, Box.whole((4,))) for row in order]), targets, None)
    assert [int(target[0]) for target in targets] == order
    assert calls == [7, 7, 7, 7, 7, 5]
    assert [range_.offset for range_ in backend.asked] == [16 * number for number in range(40)]


@pytest.mark.parametrize("remote", [False, True])
def test_a_damaged_block_is_found_and_its_tensor_named(remote: bool) -> None:
    metadata, raw = _stored([torch.ones(4), torch.ones(8), torch.ones(2)])
    damaged = bytearray(raw)
    damaged[20] ^= 1
    backend = (MemoryBackend if remote else LocalMemory)(bytes(damaged), maps=False)
    items = _items([(row, Box.whole((size,))) for row, size in enumerate((4, 8, 2))])
    checker = BlockChecker(backend, partial_blocks=False)
    with pytest.raises(CorruptCheckpointError, match="bytes 16 to 48, of 'w1'"):
        read_tensors(backend, metadata, items, [torch.zeros(size) for size in (4, 8, 2)], checker)


def test_memory_that_is_shorter_than_the_box_is_never_filled_beyond_its_end() -> None:
    metadata, raw = _stored([torch.ones(4)])
    memory = torch.zeros(8)
    with pytest.raises(HpdcpError):
        read_tensors(LocalMemory(raw, maps=False), metadata, _items([(0, Box.whole((4,)))]), [memory[:3]], None)
    assert not memory.any()


def test_a_chunk_that_is_not_as_long_as_its_shape_makes_it_is_refused() -> None:
    metadata, raw = _stored([torch.ones(4), torch.ones(4)])
    metadata.storage.length[1] -= 4
    items = _items([(0, Box.whole((4,))), (1, Box.whole((4,)))])
    with pytest.raises(CorruptCheckpointError, match=r"'w1': \[4\] of float32 is not 12 bytes"):
        read_tensors(LocalMemory(raw, maps=False), metadata, items, [torch.zeros(4), torch.zeros(4)], None)
