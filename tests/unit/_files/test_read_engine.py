"""Any box of any stored chunk into any target, compared with slicing a tensor; by every path the engine has."""

from __future__ import annotations

import itertools
import math
import signal
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import crc32c
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._base.backend import Backend, ByteRange, KeyInfo, checked_buffers
from hpdcp._base.errors import CorruptCheckpointError, KeyNotFoundError, KeyTruncatedError
from hpdcp._files import box_reads
from hpdcp._files.block_checker import BlockChecker
from hpdcp._files.box_reads import BoxRead
from hpdcp._files.parallel import for_each_file
from hpdcp._files.read_engine import read_boxes, read_extents
from hpdcp._format.checksums import BLOCK_BYTES
from hpdcp._format.metadata import StorageInfo
from hpdcp._state.geometry import Box

KEY = "_rank0_.safetensors"

# fmt: off
NAMES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
]
# fmt: on
DTYPES = [found for name in NAMES if isinstance(found := getattr(torch, name, None), torch.dtype)]


class MemoryBackend(Backend):
    """Bytes in memory, with or without maps, that counts what is asked of it."""

    name: ClassVar[str] = "memory"

    def __init__(self, data: bytes, *, maps: bool) -> None:
        self.url = "memory://here"
        self.data = data
        self.maps = maps
        self.asked: list[ByteRange] = []

    def prepare(self) -> None: ...

    def list_keys(self, under: str = "", *, recursive: bool = False) -> list[KeyInfo]:
        return [KeyInfo(KEY, len(self.data), 0.0)]

    def size(self, key: str) -> int:
        return len(self.read(key))

    def read(self, key: str) -> bytes:
        if key != KEY:
            raise KeyNotFoundError(f"nothing under {key!r}")
        return self.data

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        for range_, view in zip(ranges, checked_buffers(key, ranges, into), strict=True):
            self.asked.append(range_)
            if range_.stop > len(self.read(key)):
                raise KeyTruncatedError(f"{key!r} is short")
            view[:] = self.data[range_.offset : range_.stop]

    def map_range(self, key: str, range_: ByteRange) -> memoryview | None:
        if not self.maps:
            return None
        self.asked.append(range_)
        return memoryview(self.read(key))[range_.offset : range_.stop]

    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        raise AssertionError("a read writes nothing")

    def publish(self, key: str, data: bytes) -> None:
        raise AssertionError("a read publishes nothing")

    def delete(self, keys: Iterable[str]) -> None:
        raise AssertionError("a read removes nothing")


def blocks_of(data: bytes) -> tuple[int, ...]:
    return tuple(crc32c.crc32c(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES))


def stored_as(raw: bytes, offset: int) -> StorageInfo:
    return StorageInfo(KEY, offset, len(raw), blocks_of(raw))


def bits(tensor: torch.Tensor) -> bytes:
    # Not contiguous(): one element with a stride of two counts as contiguous, and cannot be viewed as bytes.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@st.composite
def chunks_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    sizes = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        offsets = tuple(draw(st.integers(0, size)) for size in sizes)
        boxes.append(
            Box(offsets, tuple(draw(st.integers(0, size - start)) for size, start in zip(sizes, offsets, strict=True)))
        )
    return sizes, boxes


def make_target(sizes: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Memory of that shape: plain, of another order of strides, every second element, or within a larger tensor."""
    if kind == "reversed":
        return torch.zeros(sizes[::-1], dtype=dtype).permute(tuple(range(len(sizes)))[::-1])
    if kind == "stepped" and sizes:
        return torch.zeros((*sizes[:-1], sizes[-1] * 2), dtype=dtype)[..., ::2]
    if kind == "inner":
        target = torch.zeros(tuple(size + 2 for size in sizes), dtype=dtype)
        for axis, size in enumerate(sizes):
            target = target.narrow(axis, 1, size)
        return target
    return torch.zeros(sizes, dtype=dtype)


@settings(max_examples=150)
@given(
    chunks_and_boxes(),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "reversed", "stepped", "inner"]),
    st.booleans(),
    st.sampled_from([1, 8, 24, 64, 1 << 20]),
    st.sampled_from([1, 16, 64 << 10]),
    st.sampled_from([0, 1, 3, 4096]),
    st.sampled_from([None, False, True]),
    st.integers(0, 2**32 - 1),
)
def test_any_box_arrives_bit_for_bit(
    shape: tuple[tuple[int, ...], list[Box]],
    dtype: torch.dtype,
    kind: str,
    maps: bool,
    slab: int,
    long_run: int,
    offset: int,
    partial: bool | None,
    seed: int,
) -> None:
    sizes, boxes = shape
    raw = np.random.default_rng(seed).bytes(math.prod(sizes) * dtype.itemsize)
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    chunk = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(sizes)
    backend = MemoryBackend(b"\xaa" * offset + raw + b"\xbb" * 8, maps=maps)
    stored = stored_as(raw, offset)
    reads = [BoxRead("w", stored, dtype, sizes, box, make_target(box.sizes, dtype, kind)) for box in boxes]
    checker = None if partial is None else BlockChecker(backend, partial_blocks=partial)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_reads, "SLAB_BYTES", slab)
        patch.setattr(box_reads, "_LONG_RUN_BYTES", long_run)
        read_boxes(backend, reads, checker)
    for read, box in zip(reads, boxes, strict=True):
        wanted = chunk[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
        assert bits(read.target) == bits(wanted)
    assert all(offset <= asked.offset and asked.stop <= offset + len(raw) for asked in backend.asked)


@settings(max_examples=40)
@given(chunks_and_boxes(), st.sampled_from(["plain", "reversed", "stepped", "inner"]), st.booleans())
def test_a_target_of_another_dtype_gets_what_copy_gives(
    shape: tuple[tuple[int, ...], list[Box]], kind: str, maps: bool
) -> None:
    sizes, boxes = shape
    chunk = torch.arange(math.prod(sizes), dtype=torch.float64).reshape(sizes) / 3
    raw = bits(chunk)
    backend = MemoryBackend(raw, maps=maps)
    for dtype in (torch.bfloat16, torch.int32, torch.complex64):
        reads = [
            BoxRead("w", stored_as(raw, 0), torch.float64, sizes, box, make_target(box.sizes, dtype, kind))
            for box in boxes
        ]
        read_boxes(backend, reads, None)
        for read, box in zip(reads, boxes, strict=True):
            wanted = chunk[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(read.target, torch.zeros(box.sizes, dtype=dtype).copy_(wanted))


@pytest.mark.parametrize("lazily", [torch.conj, torch._neg_view])
def test_lazily_conjugated_and_negated_targets_hold_the_stored_value(lazily: Any) -> None:
    chunk = torch.complex(torch.arange(6.0), torch.arange(6.0) + 10)
    raw = bits(chunk)
    target = lazily(torch.zeros(6, dtype=torch.complex64))
    read_boxes(
        MemoryBackend(raw, maps=True),
        [BoxRead("w", stored_as(raw, 0), torch.complex64, (6,), Box((0,), (6,)), target)],
        None,
    )
    assert torch.equal(target.resolve_conj().resolve_neg(), chunk)


def test_rows_are_read_without_the_rest_of_the_tensor() -> None:
    chunk = torch.arange(1000.0).reshape(100, 10)
    backend = MemoryBackend(bits(chunk), maps=False)
    target = torch.zeros(3, 10)
    read = BoxRead("w", stored_as(backend.data, 0), torch.float32, (100, 10), Box((7, 0), (3, 10)), target)
    read_boxes(backend, [read], None)
    assert backend.asked == [ByteRange(7 * 40, 3 * 40)]
    assert torch.equal(target, chunk[7:10])


@pytest.mark.parametrize("maps", [False, True])
def test_a_column_passes_each_byte_of_its_rows_once_and_in_bounded_pieces(
    maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_reads, "SLAB_BYTES", 400)
    chunk = torch.arange(1000.0).reshape(100, 10)
    backend = MemoryBackend(bits(chunk), maps=maps)
    target = torch.zeros(100, 2)
    read = BoxRead("w", stored_as(backend.data, 0), torch.float32, (100, 10), Box((0, 4), (100, 2)), target)
    read_boxes(backend, [read], None)
    assert torch.equal(target, chunk[:, 4:6])
    assert all(asked.length <= 400 for asked in backend.asked)
    in_order = sorted(backend.asked, key=lambda asked: asked.offset)
    assert all(a.stop <= b.offset for a, b in itertools.pairwise(in_order))
    assert sum(asked.length for asked in backend.asked) <= len(backend.data)


def damaged(raw: bytes, position: int) -> bytes:
    return raw[:position] + struct.pack("B", raw[position] ^ 1) + raw[position + 1 :]


@pytest.mark.parametrize("kind", ["plain", "stepped"])
@pytest.mark.parametrize("maps", [False, True])
def test_a_block_that_differs_is_named_with_file_tensor_and_bytes(kind: str, maps: bool) -> None:
    raw = bytes(BLOCK_BYTES + 100)
    backend = MemoryBackend(b"head" + damaged(raw, BLOCK_BYTES + 7), maps=maps)
    target = make_target((len(raw),), torch.uint8, kind)
    read = BoxRead("layer.w", stored_as(raw, 4), torch.uint8, (len(raw),), Box((0,), (len(raw),)), target)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_boxes(backend, [read], BlockChecker(backend, partial_blocks=False))
    for part in (KEY, "layer.w", str(4 + BLOCK_BYTES), str(4 + len(raw))):
        assert part in str(caught.value)
    read_boxes(backend, [read], None)


def test_a_block_read_in_part_is_checked_only_when_asked_and_then_once() -> None:
    raw = bytes(2 * BLOCK_BYTES)
    backend = MemoryBackend(damaged(raw, BLOCK_BYTES + 5), maps=False)

    def reads() -> list[BoxRead]:
        boxes = [Box((start,), (10,)) for start in (0, 100, 200, BLOCK_BYTES - 20)]
        stored = stored_as(raw, 0)
        return [
            BoxRead("w", stored, torch.uint8, (len(raw),), box, torch.zeros(10, dtype=torch.uint8)) for box in boxes
        ]

    read_boxes(backend, reads(), BlockChecker(backend, partial_blocks=False))
    assert sum(asked.length for asked in backend.asked) == 40
    backend.asked.clear()
    read_boxes(backend, reads(), BlockChecker(backend, partial_blocks=True))
    assert sum(asked.length for asked in backend.asked) == 40 + BLOCK_BYTES
    last = BoxRead(
        "w", stored_as(raw, 0), torch.uint8, (len(raw),), Box((len(raw) - 1,), (1,)), torch.zeros(1, dtype=torch.uint8)
    )
    with pytest.raises(CorruptCheckpointError):
        read_boxes(backend, [last], BlockChecker(backend, partial_blocks=True))


def test_a_file_that_is_short_or_lost_is_an_error_of_the_store() -> None:
    raw = bytes(40)
    read = BoxRead("w", stored_as(raw, 8), torch.float32, (10,), Box((0,), (10,)), torch.zeros(10))
    with pytest.raises(CorruptCheckpointError):
        read_boxes(MemoryBackend(raw, maps=False), [read], None)
    lost = BoxRead("w", StorageInfo("gone", 0, 40, (0,)), torch.float32, (10,), Box((0,), (10,)), torch.zeros(10))
    with pytest.raises(KeyNotFoundError):
        read_boxes(MemoryBackend(raw, maps=False), [lost], None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("maps", [False, True])
def test_every_block_that_arrives_whole_is_checked_whatever_way_it_takes(
    dtype: torch.dtype, maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_reads, "SLAB_BYTES", BLOCK_BYTES)
    raw = bytes(4 * BLOCK_BYTES + 99)
    begin = BLOCK_BYTES // 2

    def read(position: int) -> None:
        backend = MemoryBackend(damaged(raw, position), maps=maps)
        box = Box((begin,), (len(raw) - begin,))
        target = torch.zeros(box.sizes, dtype=dtype)
        read_boxes(
            backend,
            [BoxRead("w", stored_as(raw, 0), torch.uint8, (len(raw),), box, target)],
            BlockChecker(backend, partial_blocks=False),
        )

    read(BLOCK_BYTES - 1)  # of the first block only a part arrives
    for position in (BLOCK_BYTES, 3 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES, len(raw) - 1):
        with pytest.raises(CorruptCheckpointError):
            read(position)


class MeetingBackend(MemoryBackend):
    """Answers only when as many requests are under way as there are expected to be."""

    def __init__(self, data: bytes, together: int) -> None:
        super().__init__(data, maps=False)
        self.meeting = threading.Barrier(together)

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        self.meeting.wait(timeout=30)
        super().read_ranges(key, ranges, into)


def test_windows_are_fetched_several_at_once_across_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_reads, "SLAB_BYTES", 1000)
    raw = np.random.default_rng(5).bytes(4000)
    target = torch.zeros(4000, dtype=torch.uint8)
    backend = MeetingBackend(raw, together=4)
    read_boxes(backend, [BoxRead("w", stored_as(raw, 0), torch.uint8, (4000,), Box((0,), (4000,)), target)], None)
    assert bits(target) == raw
    assert sorted(asked.length for asked in backend.asked) == [1000] * 4


def test_files_are_looked_at_several_at_once_across_a_network() -> None:
    met = threading.Barrier(8)
    answers = for_each_file(MemoryBackend(b"", maps=False), lambda file: (met.wait(timeout=30), file)[1], range(8))
    assert answers == list(range(8))


def test_after_a_failure_no_further_window_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_reads, "SLAB_BYTES", 10)
    raw = bytes(10_000)
    backend = MemoryBackend(raw[:5], maps=False)
    target = torch.zeros(10_000, dtype=torch.uint8)
    with pytest.raises(KeyTruncatedError):
        read_boxes(
            backend, [BoxRead("w", stored_as(raw, 0), torch.uint8, (10_000,), Box((0,), (10_000,)), target)], None
        )
    assert len(backend.asked) <= 8


def test_an_interrupt_ends_the_reading_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_reads, "SLAB_BYTES", 10)
    raw = bytes(20_000)
    backend = MemoryBackend(raw, maps=False)
    asked = threading.Event()
    read_ranges = backend.read_ranges

    def slowly(*arguments: Any) -> None:
        asked.set()
        time.sleep(0.01)
        read_ranges(*arguments)

    monkeypatch.setattr(backend, "read_ranges", slowly)
    threading.Thread(target=lambda: (asked.wait(30), signal.raise_signal(signal.SIGINT))).start()
    target = torch.zeros(20_000, dtype=torch.uint8)
    read = BoxRead("w", stored_as(raw, 0), torch.uint8, (20_000,), Box((0,), (20_000,)), target)
    with pytest.raises(KeyboardInterrupt):
        read_boxes(backend, [read], None)
    assert len(backend.asked) < 1000


def test_small_extents_of_one_file_are_asked_for_together() -> None:
    backend = MemoryBackend(bytes(range(100)), maps=False)
    extents = [StorageInfo(KEY, offset, 5, (0,)) for offset in (40, 0, 90)]
    assert read_extents(backend, extents) == [bytes(range(o, o + 5)) for o in (40, 0, 90)]
