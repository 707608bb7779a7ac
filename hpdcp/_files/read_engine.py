"""Boxes of stored chunks into local tensors: one engine for every backend.

Boxes become pieces, in the order of the files' bytes. A piece that lies in one run in the file and in the target, in
one dtype and on the host, is read straight into the target's memory; any other passes through a map of the file where
the backend has one, or through memory of the engine's own. Pieces of one file are asked for together, so that the
backend can fetch them at once and join what lies close. Across a network a window of at most `SLAB_BYTES` is asked for
at a time, several windows at once: while one is checked and copied, others are on their way.

What goes to a device is read into page-locked memory, two pieces of it in turn for each thread that reads: while one is
filled, the other's contents are on their way to the device, on a stream of their own.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
import torch

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._base.threads import Threads
from hpdcp._devices import device
from hpdcp._devices.streams import follow_all
from hpdcp._devices.uploads import BounceBuffers
from hpdcp._format.checksums import block_span, blocks_between, checksum
from hpdcp._format.metadata import StorageInfo
from hpdcp._state.geometry import Box, flat_start, is_contiguous, relative, row_runs
from hpdcp._state.views import view_of_box

SLAB_BYTES = 32 << 20
"""Most host memory that a window takes which passes through memory of the engine's own; a multiple of `BLOCK_BYTES`."""
_LONG_RUN_BYTES = 64 << 10
"""From here on a run is worth a request of its own, even where the file could be mapped."""
_WINDOWS_AT_ONCE: Final = 4
"""Windows on their way across a network; with requests of 8 MiB that makes 16 of them."""
_FILES_AT_ONCE: Final = 16
"""Small requests on their way across a network."""
_ALIGNMENT: Final = 64

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class BoxRead:
    """One box of a stored chunk, and where it goes."""

    fqn: str
    """For messages."""
    stored: StorageInfo
    dtype: torch.dtype
    """Of the stored elements."""
    sizes: tuple[int, ...]
    """The stored chunk's."""
    box: Box
    """What to read, in the stored chunk's own coordinates."""
    target: torch.Tensor
    """Shaped `box.sizes`; any device, dtype, strides."""


class Checker:
    """Compares blocks of stored extents with their checksums."""

    def __init__(self, backend: Backend, *, partial_blocks: bool) -> None:
        self._backend = backend
        self._partial_blocks = partial_blocks
        self._checked: set[tuple[str, int, int]] = set()

    def check(self, stored: StorageInfo, fqn: str, start: int, data: memoryview) -> None:
        """Check `data`, which is what the extent holds from byte `start` of it on.

        Blocks that `data` holds in full are compared; with `partial_blocks`, the others it touches are read for it.
        An extent without checksums, in a file of another writer, passes.
        """
        if not stored.checksums:
            return
        stop = start + len(data)
        for block in blocks_between(start, stop):
            low, high = block_span(block, stored.length)
            if (stored.key, stored.offset, block) in self._checked:
                continue
            if start <= low and high <= stop:
                found = checksum(data[low - start : high - start])
            elif self._partial_blocks:
                whole = bytearray(high - low)
                self._backend.read_ranges(stored.key, [ByteRange(stored.offset + low, len(whole))], [memoryview(whole)])
                found = checksum(whole)
            else:
                continue
            if found != stored.checksums[block]:
                raise CorruptCheckpointError(
                    f"{stored.key!r} in {self._backend.url} is damaged: bytes {stored.offset + low} to "
                    f"{stored.offset + high}, of {fqn!r}, have checksum {found:08x}, recorded was "
                    f"{stored.checksums[block]:08x}. Load another checkpoint; targets read so far are undefined."
                )
            self._checked.add((stored.key, stored.offset, block))


Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Fills a target, its first argument, with a source of the same shape."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of a file, and what is done with it."""

    read: BoxRead
    range: ByteRange
    into: memoryview | None
    """The target's own memory; None where the bytes take a detour."""
    deliver: Callable[[torch.Tensor, Copy], None] | None = None
    """Puts the run, as a flat tensor of the stored dtype, where it belongs."""


def read_boxes(backend: Backend, reads: Sequence[BoxRead], checker: Checker | None) -> None:
    """Fill every target.

    Raises:
        CorruptCheckpointError: a file is shorter than recorded, or `checker` found a block that differs.
        StorageError: the store failed; targets are undefined.
    """
    in_file_order = sorted(reads, key=lambda read: (read.stored.key, read.stored.offset, read.box.offsets))
    pieces = (piece for read in in_file_order for piece in _pieces(read, cut=backend.remote))
    windows = list(_windows(pieces, bounded=backend.remote))
    workers = min(_WINDOWS_AT_ONCE if backend.remote else 1, len(windows))
    rest = iter(windows)
    lock = threading.Lock()
    failed = threading.Event()
    # Here, in the caller's thread, since what a device does next is a matter of the thread that asks.
    follow_all({read.target.device for read in reads if not device.is_host(read.target)})

    def work(_: int) -> None:
        with contextlib.closing(_WindowReader(backend, checker)) as window_reader:
            while not failed.is_set():
                with lock:
                    window = next(rest, None)
                if window is None:
                    return
                try:
                    window_reader.read(window)
                except BaseException:
                    failed.set()
                    raise

    in_parallel(work, range(workers), threads=workers, failed=failed)


def read_extents(backend: Backend, extents: Sequence[StorageInfo]) -> list[bytearray]:
    """The bytes of each extent; small ones, since all are held at once.

    Raises:
        StorageError: the store failed, or a file is shorter than recorded.
    """
    found = [bytearray(stored.length) for stored in extents]
    by_key: dict[str, list[int]] = {}
    for position, stored in enumerate(extents):
        by_key.setdefault(stored.key, []).append(position)

    def read(key: str) -> None:
        positions = by_key[key]
        ranges = [ByteRange(extents[position].offset, extents[position].length) for position in positions]
        backend.read_ranges(key, ranges, [memoryview(found[position]) for position in positions])

    for_each_file(backend, read, list(by_key))
    return found


def for_each_file(backend: Backend, action: Callable[[_Given], _Made], files: Sequence[_Given]) -> list[_Made]:
    """`action` on each of `files`, several at once where each one costs a journey across a network."""
    return in_parallel(action, files, threads=_FILES_AT_ONCE if backend.remote else 1)


def in_parallel(
    action: Callable[[_Given], _Made],
    given: Sequence[_Given],
    *,
    threads: int,
    failed: threading.Event | None = None,
) -> list[_Made]:
    """`action` on each of `given`, in order where one thread does it; the first failure is raised.

    `failed` is set on a failure, and on an interrupt, which reaches the calling thread only, before the others are
    waited for.
    """
    if threads <= 1 or len(given) <= 1:
        return [action(one) for one in given]
    with Threads(min(threads, len(given)), "hpdcp-read") as pool:
        try:
            return list(pool.map(action, given))
        except BaseException:
            if failed is not None:
                failed.set()
            pool.shutdown(cancel_futures=True)
            raise


class _WindowReader:
    """Reads windows one after another in one memory for detours, since fresh memory costs more than the copy does."""

    def __init__(self, backend: Backend, checker: Checker | None) -> None:
        self._backend = backend
        self._checker = checker
        self._memory = np.empty(0, np.uint8)
        self._bounce = BounceBuffers()

    def close(self) -> None:
        """Return when everything has reached its target, on devices as well."""
        self._bounce.drain()

    def read(self, window: Sequence[_Piece]) -> None:
        """Fill the targets of pieces of one file."""
        key = window[0].read.stored.key
        asked: list[tuple[_Piece, memoryview]] = []
        detours: list[_Piece] = []
        to_devices: list[_Piece] = []
        for piece in window:
            if piece.into is not None:
                asked.append((piece, piece.into))
            elif not device.is_host(piece.read.target):
                # Not from a map of the file, which a device's driver would copy page by page, and blocking.
                to_devices.append(piece)
            elif (mapped := self._backend.map_range(key, piece.range)) is not None:
                self._finish(piece, mapped)
            else:
                detours.append(piece)
        asked += zip(detours, self._places(detours, self._own_memory), strict=True)
        asked += zip(to_devices, self._places(to_devices, self._bounce.take), strict=True)
        if asked:
            self._backend.read_ranges(key, [piece.range for piece, _ in asked], [view for _, view in asked])
        for piece, view in asked:
            self._finish(piece, view)
        if to_devices:
            self._bounce.mark()

    def _own_memory(self, nbytes: int) -> memoryview:
        if nbytes > len(self._memory):
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory.data

    def _places(self, pieces: Sequence[_Piece], memory: Callable[[int], memoryview]) -> list[memoryview]:
        if not pieces:
            return []
        lengths = [piece.range.length for piece in pieces]
        rounded = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
        whole = memory(sum(rounded))
        starts = np.cumsum([0, *rounded]).tolist()
        return [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]

    def _finish(self, piece: _Piece, view: memoryview) -> None:
        if self._checker is not None:
            stored = piece.read.stored
            self._checker.check(stored, piece.read.fqn, piece.range.offset - stored.offset, view)
        if piece.deliver is not None:
            copy = device.copy_into if device.is_host(piece.read.target) else self._bounce.copy
            piece.deliver(_typed(view, piece.read.dtype), copy)


def _windows(pieces: Iterable[_Piece], *, bounded: bool) -> Iterator[list[_Piece]]:
    """Pieces of one file that are read together: with at most `SLAB_BYTES` of detours, or of anything if `bounded`."""
    window: list[_Piece] = []
    held = 0
    for piece in pieces:
        counted = piece.range.length if bounded or piece.into is None else 0
        if window and (held + counted > SLAB_BYTES or piece.read.stored.key != window[0].read.stored.key):
            yield window
            window, held = [], 0
        window.append(piece)
        held += counted
    if window:
        yield window


def _pieces(read: BoxRead, *, cut: bool) -> Iterator[_Piece]:
    """What to read for one box, in the order of the file; with `cut`, none of it longer than `SLAB_BYTES`."""
    target = read.target
    plain = target.is_contiguous() and target.dtype == read.dtype and not (target.is_conj() or target.is_neg())
    memory = device.host_bytes(target) if plain and device.is_host(target) else None
    if is_contiguous(read.box, read.sizes):
        if memory is not None:
            for range_, start in _cuts(read) if cut else [_whole(read)]:
                yield _Piece(read, range_, memory[start : start + range_.length])
            return
        if target.is_contiguous():
            flat = target.detach().view(-1)
            for range_, start in _cuts(read):
                part = flat.narrow(0, start // read.dtype.itemsize, range_.length // read.dtype.itemsize)
                yield _Piece(read, range_, None, partial(_take_whole, part))
            return
    elif memory is not None:
        starts, elements = row_runs(read.box, read.sizes)
        run = elements * read.dtype.itemsize
        if run >= _LONG_RUN_BYTES:
            for i, first in enumerate(starts.tolist()):
                range_ = ByteRange(read.stored.offset + first * read.dtype.itemsize, run)
                yield _Piece(read, range_, memory[i * run : (i + 1) * run])
            return
    yield from _slab_pieces(read)


def _whole(read: BoxRead) -> tuple[ByteRange, int]:
    """The one run that a contiguous box is, and 0, its place in the target."""
    itemsize = read.dtype.itemsize
    start = read.stored.offset + flat_start(read.box, read.sizes) * itemsize
    return ByteRange(start, read.box.volume * itemsize), 0


def _cuts(read: BoxRead) -> Iterator[tuple[ByteRange, int]]:
    """The run of a contiguous box in parts of at most `SLAB_BYTES`, and each one's place in the target.

    Cut where blocks end, so that every block of the run is in one part and can be checked.
    """
    whole, _ = _whole(read)
    most = max(SLAB_BYTES // read.dtype.itemsize, 1) * read.dtype.itemsize
    begin = whole.offset - read.stored.offset
    position = begin
    while position < begin + whole.length:
        stop = min((position // most + 1) * most, begin + whole.length)
        yield ByteRange(read.stored.offset + position, stop - position), position - begin
        position = stop


def _slab_pieces(read: BoxRead) -> Iterator[_Piece]:
    """Slab by slab, each the span from its first element to its last."""
    itemsize = read.dtype.itemsize
    strides = _row_major(read.sizes)
    for slab in _slabs(read.box, strides, max(1, SLAB_BYTES // itemsize)):
        elements = _span(slab, strides)
        if elements:
            start = read.stored.offset + flat_start(slab, read.sizes) * itemsize
            yield _Piece(read, ByteRange(start, elements * itemsize), None, partial(_take_slab, read, slab, strides))


def _take_whole(target: torch.Tensor, elements: torch.Tensor, copy: Copy) -> None:
    copy(target, elements)


def _take_slab(read: BoxRead, slab: Box, strides: tuple[int, ...], elements: torch.Tensor, copy: Copy) -> None:
    """Copy what is wanted of a slab's span into its place in the target."""
    target = view_of_box(read.target, relative(slab, read.box).offsets, slab.sizes)
    copy(target, elements.as_strided(slab.sizes, strides))


def _typed(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes as a flat tensor that is only ever copied from; a copy where they are not aligned for the dtype."""
    array = np.frombuffer(view, dtype=np.uint8)
    if array.ctypes.data % dtype.itemsize:
        array = array.copy()
    return device.tensor_over(array.data).view(dtype)


def _slabs(box: Box, strides: tuple[int, ...], most: int) -> Iterator[Box]:
    """Parts of `box`, in order, none of which spans more than `most` elements unless it is a single one."""
    if _span(box, strides) <= most or box.volume <= 1:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.sizes) if size > 1)
    row = _span(Box(box.offsets, (*box.sizes[:axis], 1, *box.sizes[axis + 1 :])), strides)
    rows = max(1, (most - row) // strides[axis] + 1) if row <= most else 1
    for start in range(0, box.sizes[axis], rows):
        size = min(rows, box.sizes[axis] - start)
        part = Box(
            (*box.offsets[:axis], box.offsets[axis] + start, *box.offsets[axis + 1 :]),
            (*box.sizes[:axis], size, *box.sizes[axis + 1 :]),
        )
        yield from _slabs(part, strides, most)


def _span(box: Box, strides: tuple[int, ...]) -> int:
    """Elements from the box's first to its last, both included, in an array of these strides."""
    if any(size == 0 for size in box.sizes):
        return 0
    return sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True)) + 1


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
