"""Chunks of arrays as objects: their bytes, checksums, and several written at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hpdcp._base.backend import Backend
from hpdcp._base.errors import KeyExistsError, SupersededError
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._format.checksums import BlockChecksums, HeadMark, head_mark
from hpdcp._format.metadata import StorageInfo
from hpdcp._plan.write_results import FileRecord, WriteResult
from hpdcp_backends._zarr.codecs import Compression

STREAMED_BYTES: Final = 32 << 20
"""From here on a chunk is written by itself, as its parts arrive, rather than beside others."""
_HELD_BYTES: Final = 128 << 20
"""Bytes of chunks that are held for writing."""
_THREADS_REMOTE: Final = 16
_THREADS_LOCAL: Final = 4
"""Each object is made durable on its own, which is mostly waiting: four at once took 0.4 of the time of one."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What of a tensor goes into one object."""

    key: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    """Inside the tensor."""
    steps: tuple[int, ...]
    """Of the grid: what the object holds, filled up with zeros where the tensor ends."""
    compression: Compression | None

    @property
    def nbytes(self) -> int:
        """Of the elements inside the tensor."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    @property
    def is_prefix(self) -> bool:
        """Whether the elements are the first of the object, in a row."""
        return self.sizes[1:] == self.steps[1:] and self.compression is None

    @property
    def full_bytes(self) -> int:
        """Of the object before compression."""
        return torch.Size(self.steps).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Written:
    """One chunk's object, and the two ways to say what is in it."""

    file: FileRecord
    stored: WriteResult
    original: WriteResult


class ChunkWriter:
    """Writes objects on threads of its own, within a bound on what is held; `finish` waits for all."""

    def __init__(self, backend: Backend, note: Callable[[str], None]) -> None:
        self._backend = backend
        self._note = note
        self._pool = ThreadPoolExecutor(_THREADS_REMOTE if backend.remote else _THREADS_LOCAL, "hpdcp-zarr")
        self._waiting: list[tuple[int, Future[Written]]] = []
        self._held = 0
        self._room = threading.Condition()
        self.written: dict[int, Written] = {}
        self.documents: list[FileRecord] = []

    def write(self, number: int, chunk: Chunk, parts: Iterable[torch.Tensor]) -> None:
        """Store the chunk, the elements of which come in row-major order; its result goes under `number`."""
        if chunk.nbytes >= STREAMED_BYTES and chunk.is_prefix:
            self.written[number] = self._store(chunk, parts)
            return
        kept = list(parts)
        with self._room:
            while self._held and self._held + chunk.nbytes > _HELD_BYTES:
                self._room.wait()
            self._held += chunk.nbytes
        self._waiting.append((number, self._pool.submit(self._store_held, chunk, kept)))
        self._collect(done_only=True)

    def write_document(self, key: str, data: bytes) -> None:
        """Store a document that describes a node."""
        self.documents.append(self._create(key, [memoryview(data)], len(data), head_mark(data)))

    def finish(self) -> None:
        """Return when everything is stored; the first failure is raised when nothing is under way any more."""
        try:
            self._collect(done_only=False)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def abandon(self) -> None:
        """Return when nothing is under way any more; what has not begun is not written."""
        self._pool.shutdown(cancel_futures=True)

    def _collect(self, *, done_only: bool) -> None:
        left = []
        for number, future in self._waiting:
            if done_only and not future.done():
                left.append((number, future))
            else:
                self.written[number] = future.result()
        self._waiting = left

    def _store_held(self, chunk: Chunk, parts: Sequence[torch.Tensor]) -> Written:
        try:
            return self._store(chunk, parts)
        finally:
            with self._room:
                self._held -= chunk.nbytes
                self._room.notify()

    def _store(self, chunk: Chunk, parts: Iterable[torch.Tensor]) -> Written:
        original, head = BlockChecksums(), HeadMark()
        if chunk.is_prefix:
            file = self._create(chunk.key, _padded(parts, chunk, original, head), chunk.full_bytes, head)
            checksums = tuple(original.finish())
            result = WriteResult(StorageInfo(chunk.key, 0, chunk.nbytes, checksums))
            return Written(file, result, result)
        stored, data = BlockChecksums(), _whole(parts, chunk, original)
        view = data.data if chunk.compression is None else chunk.compression.encode(data, chunk.dtype.itemsize)
        for piece in _slices(view):
            stored.add(piece)
        head.add(view)
        file = self._create(chunk.key, _slices(view), len(view), head)
        return Written(
            file,
            WriteResult(StorageInfo(chunk.key, 0, len(view), tuple(stored.finish()))),
            WriteResult(StorageInfo(chunk.key, 0, chunk.nbytes, tuple(original.finish()))),
        )

    def _create(self, key: str, pieces: Iterable[memoryview], size: int, mark: int | HeadMark) -> FileRecord:
        try:
            self._backend.write(key, pieces, size=size, exclusive=self._backend.conditional_create)
        except KeyExistsError as error:
            raise SupersededError(
                f"{error} It was not there when this save began: another save is at work in this folder. Make sure "
                "that only one job saves to a folder at a time, and save again."
            ) from error
        self._note(key)
        return FileRecord(key, size, mark if isinstance(mark, int) else mark.value)


def _padded(
    parts: Iterable[torch.Tensor], chunk: Chunk, original: BlockChecksums, head: HeadMark
) -> Iterator[memoryview]:
    """The elements' own memory, then zeros up to the end of the object."""
    for part in parts:
        for piece in byte_pieces(part):
            original.add(piece)
            head.add(piece)
            yield piece
    left = chunk.full_bytes - chunk.nbytes
    zeros = memoryview(bytes(min(left, 1 << 20)))
    while left:
        piece = zeros[: min(left, len(zeros))]
        head.add(piece)
        yield piece
        left -= len(piece)


def _whole(
    parts: Iterable[torch.Tensor], chunk: Chunk, original: BlockChecksums
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """All bytes of the object before compression."""
    inside = np.empty(chunk.nbytes, dtype=np.uint8)
    at = 0
    for part in parts:
        for piece in byte_pieces(part):
            original.add(piece)
            inside[at : at + len(piece)] = piece
            at += len(piece)
    if chunk.sizes == chunk.steps:
        return inside
    whole = np.zeros((*chunk.steps, chunk.dtype.itemsize), dtype=np.uint8)
    whole[tuple(map(slice, chunk.sizes))] = inside.reshape(*chunk.sizes, chunk.dtype.itemsize)
    return whole.reshape(-1)


def _slices(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), 512 << 10):
        yield view[start : start + (512 << 10)]
