"""Where the elements of a stored tensor lie, in its row-major order: what a stream reads, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import CorruptCheckpointError, CoverageError
from hpdcp._base.splitting import cut_rows
from hpdcp._format.metadata import Metadata, MetadataIndex, StorageInfo
from hpdcp._plan.load_plan import ReadItem
from hpdcp._plan.stored_index import StoredIndex
from hpdcp._state.coverage import missing
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.geometry import Box, flat_start, is_contiguous, relative


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A tensor, or a box of one, to be streamed."""

    row: int
    """Of the metadata's entries; not an alias."""
    box: Box
    dtype: torch.dtype | None = None
    """What to cast to; None: as it is stored."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Consecutive bytes of one stored chunk."""

    stored: StorageInfo
    start: int
    """Byte of the chunk."""
    nbytes: int

    @property
    def in_file(self) -> ByteRange:
        """The same bytes, counted from the start of the file."""
        return ByteRange(self.stored.offset + self.start, self.nbytes)

    def split(self, most: int) -> Iterator[ChunkRange]:
        """Ranges of at most `most` bytes, cut where checksums end as far as that is a multiple of theirs."""
        position, end = self.start, self.start + self.nbytes
        while position < end:
            stop = min((position // most + 1) * most, end)
            yield ChunkRange(self.stored, position, stop - position)
            position = stop


@dataclass(frozen=True, slots=True)
class StreamStep:
    """What is read at a time for one request: a range of bytes, or a box."""

    number: int
    """Which request."""
    request: StreamRequest
    range: ChunkRange | None
    box: Box | None
    nbytes: int
    """As it is stored."""
    room: int
    """Bytes it takes once it is cast."""


class StreamPlanner:
    """Finds what is stored of requested tensors.

    Args:
        url: of the checkpoint, for messages.
        is_plain: whether what is stored of a tensor is its elements and nothing else, so that bytes can be read.
    """

    def __init__(self, metadata: Metadata, url: str, *, is_plain: bool) -> None:
        self.is_plain: Final = is_plain
        self._metadata = metadata
        self._url = url
        self._stored = StoredIndex(metadata)

    def dtype(self, row: int) -> torch.dtype:
        """Of the entry.

        Raises:
            UnsupportedTypeError: this torch has no such dtype.
        """
        entries = self._metadata.entries
        return dtype_of(entries.dtype(row), fqn=entries.fqns[row])

    def check_coverage(self, request: StreamRequest) -> None:
        """Raise unless every element is stored.

        Raises:
            CoverageError: naming the key and the hole.
        """
        hole = missing(request.box, [part for _, _, part in self._stored.overlaps(request.row, request.box)])
        if hole is not None:
            raise CoverageError(
                f"{self._url} holds {self._metadata.entries.fqns[request.row]!r} only in part: nothing is stored for "
                f"{list(hole.offsets)} to {list(hole.stops)}. Convert another checkpoint."
            )

    def index(self, row: int, box: Box) -> MetadataIndex:
        """The name that a storage reader knows the box by."""
        owner = int(self._metadata.entries.owners[row])
        return MetadataIndex(self._metadata.entries.fqns[row], box.offsets, box.sizes, None if owner < 0 else owner)

    def read_items(self, row: int, box: Box) -> Iterator[ReadItem]:
        """What to read for the box, each item into its place in the box."""
        index = self.index(row, box)
        for chunk_row, have, part in self._stored.overlaps(row, box):
            yield ReadItem(index, chunk_row, relative(part, box).offsets, relative(part, have).offsets, part.sizes)

    def steps(self, number: int, request: StreamRequest, most: int) -> Iterator[StreamStep]:
        """The request in steps of at most `most` bytes each, unless one row is larger, in row-major order."""
        if request.box.is_empty:
            return
        itemsize = self.dtype(request.row).itemsize
        growth = 1 if request.dtype is None else max(1, request.dtype.itemsize // itemsize)
        ranges = self.ranges(request)
        if ranges is not None:
            for part in (part for whole in ranges for part in whole.split(most // growth)):
                yield StreamStep(number, request, part, None, part.nbytes, part.nbytes * growth)
            return
        for box in row_blocks(request.box, max(1, most // growth // itemsize)):
            nbytes = box.volume * itemsize
            yield StreamStep(number, request, None, box, nbytes, nbytes * growth)

    def only_range(self, request: StreamRequest) -> ChunkRange | None:
        """The one range that is the requested elements as they are stored; None where there is no such range."""
        ranges = None if request.dtype is not None or request.box.is_empty else self.ranges(request)
        return ranges[0] if ranges is not None and len(ranges) == 1 else None

    def ranges(self, request: StreamRequest) -> list[ChunkRange] | None:
        """The stored bytes that are the requested elements in row-major order; None where they are not."""
        shape = self._metadata.entries.shape(request.row)
        itemsize = self.dtype(request.row).itemsize
        if not self.is_plain or not is_contiguous(request.box, shape):
            return None
        found: list[tuple[int, int, ChunkRange]] = []
        for chunk_row, have, part in self._stored.overlaps(request.row, request.box):
            within = relative(part, have)
            if not is_contiguous(part, shape) or not is_contiguous(within, have.sizes):
                return None
            stored = self.extent(self._metadata.resolve(request.row), chunk_row, have.sizes)
            begin = flat_start(part, shape)
            range_ = ChunkRange(stored, flat_start(within, have.sizes) * itemsize, part.volume * itemsize)
            found.append((begin, begin + part.volume, range_))
        found.sort(key=lambda each: each[:2])
        position = flat_start(request.box, shape)
        for begin, end, _ in found:
            if begin != position:
                return None
            position = end
        return [range_ for _, _, range_ in found]

    def extent(self, row: int, chunk_row: int, sizes: tuple[int, ...]) -> StorageInfo:
        """Where a chunk is stored, plainly, once its length is known to fit.

        Raises:
            CorruptCheckpointError: it does not.
        """
        stored = self._metadata.storage_info(chunk_row)
        if stored.length != math.prod(sizes) * self.dtype(row).itemsize:
            raise CorruptCheckpointError(
                f"{self._metadata.entries.fqns[row]!r}: {list(sizes)} of {self._metadata.entries.dtype(row)} is not "
                f"{stored.length} bytes; the metadata of {self._url} is damaged."
            )
        return stored


def row_blocks(box: Box, most: int) -> Iterator[Box]:
    """Boxes that make up `box`, in row-major order, of at most `most` elements; whole rows where they fit.

    >>> [part.sizes for part in row_blocks(Box.whole((5, 4)), 8)]
    [(2, 4), (2, 4), (1, 4)]
    >>> [part.offsets for part in row_blocks(Box.whole((2, 4)), 2)]
    [(0, 0), (0, 2), (1, 0), (1, 2)]
    """
    if box.volume <= most or box.volume <= 1:
        yield box
        return
    axis, parts = cut_rows(box.sizes, most)
    for start, size in parts:
        offsets = (*box.offsets[:axis], box.offsets[axis] + start, *box.offsets[axis + 1 :])
        yield from row_blocks(Box(offsets, (*box.sizes[:axis], size, *box.sizes[axis + 1 :])), most)
