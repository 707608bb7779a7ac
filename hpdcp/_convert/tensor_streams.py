"""Stored tensors as streams: what a conversion reads, in order, in blocks of bounded size.

A tensor whose stored chunks follow one another in its own row-major order (one file's tensor, rows shared among ranks,
a ragged one) is read as the byte runs it consists of: views of the file where the backend maps, else memory that is
used again. Any other is put together block of rows by block of rows, through the path that loads take.

One thread reads ahead: while a block is written, the next ones are on their way.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

import numpy as np
import torch

from hpdcp._base import config
from hpdcp._base.backend import ByteRange
from hpdcp._base.errors import CheckpointReplacedError, CorruptCheckpointError, CoverageError
from hpdcp._devices import device
from hpdcp._files import registry
from hpdcp._files.layout import Verify
from hpdcp._files.read_engine import BoxRead, Checker, in_parallel, read_boxes
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.metadata import Metadata, MetadataIndex, StorageInfo
from hpdcp._plan.load_plan import LoadPlan, ReadItem
from hpdcp._plan.planner import LoadPlanner, PlannerContext
from hpdcp._plan.stored_index import Stored
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.geometry import Box, flat_start, is_contiguous, missing, relative
from hpdcp._state.views import view_of_box

STREAM_BYTES: Final = 32 << 20
"""Most that a block holds, unless one row is larger; a multiple of `metadata.BLOCK_BYTES`, so that few
checksums are split."""
_AHEAD: Final = 2
"""Blocks that are read ahead of the one that is written."""
_FILES_AT_ONCE: Final = 4
"""Files of one block that are read at a time across a network."""
_ALIGNMENT: Final = 64

T = TypeVar("T")
Parts: TypeAlias = Generator[tuple[int, torch.Tensor], None, None]
_Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor, or a box of one, to be streamed."""

    row: int
    """Of the metadata's entries; not an alias."""
    box: Box
    dtype: torch.dtype | None = None
    """What to cast to; None: as it is stored."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive bytes of one stored chunk."""

    stored: StorageInfo
    start: int
    """Byte of the chunk."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Segment:
    """What is read at a time of one wanted tensor: a run of bytes, or a box."""

    number: int
    """Which of those wanted."""
    wanted: Wanted
    run: _Run | None
    box: Box | None
    nbytes: int
    """As it is stored."""
    room: int
    """Bytes it takes once it is cast."""


class StoredTensors:
    """The tensors of one checkpoint, from any layout of ranks, or of a Hugging Face folder.

    Whatever checksums are on record are compared, unless the configuration's `verify` is "never": what comes out of a
    conversion has none, or new ones, so this is the last moment at which damage shows.

    Args:
        as_a_load: compare only what a load would, so that what is mapped is not read before somebody wants it.
    """

    def __init__(self, reader: FileSystemReader, metadata: Metadata, *, as_a_load: bool = False) -> None:
        self.metadata = metadata
        self._reader = reader
        self._stored = Stored(metadata)
        self._memory = _Memory()
        self._cast_memory = _Memory()
        # From here, where no bar is shown yet: one counts what is written, not what is read for it as well.
        self._context = contextvars.copy_context()
        self._maps = True
        layout = registry.find_layout(metadata.settings.get("layout", "safetensors"))
        self.is_plain: Final[bool] = layout().plain_extents
        """Whether what is stored of a tensor is its elements and nothing else."""
        verify = Verify(config.current().verify)
        skipped = verify is Verify.NEVER or (as_a_load and verify is Verify.AUTO and not reader.backend.remote)
        checked = metadata.has_checksums and not skipped
        self._checker = Checker(reader.backend, partial_blocks=True) if checked else None
        reader.configure_reader(metadata, PlannerContext(0, 1, is_coordinator=False, collective=False))
        self._versions = None if metadata.has_checksums else self._files_now()

    def dtype(self, row: int) -> torch.dtype:
        """Of the entry.

        Raises:
            UnsupportedTypeError: this torch has no such dtype.
        """
        entries = self.metadata.entries
        return dtype_of(entries.dtype(row), fqn=entries.fqns[row])

    def check(self, wanted: Iterable[Wanted]) -> None:
        """Raise unless all that is wanted is there: dtypes, every box, the files and how they begin.

        Raises:
            UnsupportedTypeError, CoverageError, CorruptCheckpointError, KeyNotFoundError: naming the key.
        """
        some_item: dict[int, ReadItem] = {}
        for each in wanted:
            self.dtype(each.row)
            pieces = list(self._stored.pieces(each.row, each.box))
            hole = missing(each.box, [part for _, _, part in pieces])
            if hole is not None:
                raise CoverageError(
                    f"{self._reader.backend.url} holds {self.metadata.entries.fqns[each.row]!r} only in part: nothing "
                    f"is stored for {list(hole.offsets)} to {list(hole.stops)}. Convert another checkpoint."
                )
            for item in self._items(each.row, each.box, each.box):
                some_item.setdefault(int(self.metadata.storage.file[item.storage_row]), item)
        self._reader.optimize_local_plan(LoadPlan.build(list(some_item.values())))

    def check_unchanged(self) -> None:
        """Raise if files without checksums were replaced since this was made: what was read may be a mixture.

        Raises:
            CheckpointReplacedError: naming one.
        """
        if self._versions is None:
            return
        now = self._files_now()
        changed = [key for key, version in self._versions.items() if now.get(key) != version]
        if changed:
            raise CheckpointReplacedError(
                f"{self._reader.backend.url}: {changed[0]!r} was changed while it was read, so what was read may be a "
                "mixture. Convert again."
            )

    def _files_now(self) -> dict[str, tuple[int, float]]:
        wanted = set(self.metadata.files)
        listing = self._reader.backend.list_keys()
        return {info.key: (info.size, info.modified) for info in listing if info.key in wanted}

    def stream(self, wanted: Sequence[Wanted]) -> Parts:
        """The elements of each, one after another in row-major order: (which, some of its elements).

        Blocks are made ahead of time. A tensor's memory is only ever read, and used again once nobody holds it.
        """
        segments = (segment for number, each in enumerate(wanted) for segment in self._segments(number, each))
        makers = (partial(self._read, block) for block in _blocks(segments))
        with closing(_ahead(makers, self._context.copy())) as ready:
            for block in ready:
                while block:
                    yield block.popleft()

    def whole(self, wanted: Wanted) -> torch.Tensor:
        """All of it at once, in memory of its own unless it can be mapped; only to be read."""
        run = self._one_run(wanted)
        mapped = None if run is None else self._map(run)
        if run is not None and mapped is not None:
            self._check(wanted.row, run, mapped)
            return device.tensor_over(mapped).view(self.dtype(wanted.row)).view(wanted.box.sizes)
        target = device.empty_on_host(wanted.box.sizes, wanted.dtype or self.dtype(wanted.row))
        self.fill([(wanted, target)])
        return target

    def fill(
        self, wanted: Sequence[tuple[Wanted, torch.Tensor]], on_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        """Copy each into its tensor, contiguous memory of the host; `on_bytes` is told of each so many bytes."""
        at = [0] * len(wanted)
        for number, part in self.stream([each for each, _ in wanted]):
            flat = wanted[number][1].view(-1)
            device.copy_into(flat[at[number] : at[number] + part.numel()], part.view(-1))
            at[number] += part.numel()
            on_bytes(part.numel() * part.element_size())

    def mapped_privately(self, wanted: Wanted, map_key: Callable[[str], memoryview | None]) -> torch.Tensor | None:
        """A tensor over a private map of the one file that holds it, for its owner to change; None where there is none.

        `map_key` gives the map of a file. None also where the bytes are not aligned for the dtype.
        """
        run = self._one_run(wanted)
        view = None if run is None else map_key(run.stored.key)
        if run is None or view is None or len(view) < _range(run).stop:
            return None
        part = view[_range(run).offset : _range(run).stop]
        flat = device.tensor_over(part)
        if flat.data_ptr() % self.dtype(wanted.row).itemsize:
            return None
        self._check(wanted.row, run, part)
        return flat.view(self.dtype(wanted.row)).view(wanted.box.sizes)

    def _one_run(self, wanted: Wanted) -> _Run | None:
        """The only run that is the wanted elements as they are stored; None where there is no such run."""
        runs = None if wanted.dtype is not None or wanted.box.is_empty else self._runs(wanted)
        return runs[0] if runs is not None and len(runs) == 1 else None

    def _segments(self, number: int, wanted: Wanted) -> Iterator[_Segment]:
        if wanted.box.is_empty:
            return
        itemsize = self.dtype(wanted.row).itemsize
        growth = 1 if wanted.dtype is None else max(1, wanted.dtype.itemsize // itemsize)
        runs = self._runs(wanted)
        if runs is not None:
            for part in (part for run in runs for part in _cut(run, STREAM_BYTES // growth)):
                yield _Segment(number, wanted, part, None, part.nbytes, part.nbytes * growth)
            return
        for box in row_blocks(wanted.box, max(1, STREAM_BYTES // growth // itemsize)):
            nbytes = box.volume * itemsize
            yield _Segment(number, wanted, None, box, nbytes, nbytes * growth)

    def _runs(self, wanted: Wanted) -> list[_Run] | None:
        """The stored runs that are the wanted elements in row-major order; None where they are not runs."""
        shape = self.metadata.entries.shape(wanted.row)
        itemsize = self.dtype(wanted.row).itemsize
        if not self.is_plain or not is_contiguous(wanted.box, shape):
            return None
        found: list[tuple[int, int, _Run]] = []
        for chunk_row, have, part in self._stored.pieces(wanted.row, wanted.box):
            within = relative(part, have)
            if not is_contiguous(part, shape) or not is_contiguous(within, have.sizes):
                return None
            stored = self._extent(self.metadata.resolve(wanted.row), chunk_row, have.sizes)
            begin = flat_start(part, shape)
            run = _Run(stored, flat_start(within, have.sizes) * itemsize, part.volume * itemsize)
            found.append((begin, begin + part.volume, run))
        found.sort(key=lambda each: each[:2])
        position = flat_start(wanted.box, shape)
        for begin, end, _ in found:
            if begin != position:
                return None
            position = end
        return [run for _, _, run in found]

    def _items(self, row: int, box: Box, dest: Box) -> Iterator[ReadItem]:
        """What to read for `box`, which lies in `dest`."""
        index = _index(self.metadata, row, dest)
        for chunk_row, have, part in self._stored.pieces(row, box):
            yield ReadItem(index, chunk_row, relative(part, dest).offsets, relative(part, have).offsets, part.sizes)

    def _read(self, block: Sequence[_Segment]) -> deque[tuple[int, torch.Tensor]]:
        """One block: a tensor for each segment."""
        with self._reader.missing_files_explained():
            return self._read_here(block)

    def _read_here(self, block: Sequence[_Segment]) -> deque[tuple[int, torch.Tensor]]:
        parts: list[torch.Tensor | None] = [self._mapped(segment) for segment in block]
        absent = [position for position, part in enumerate(parts) if part is None]
        for position, view in zip(absent, self._memory.places([block[p].nbytes for p in absent]), strict=True):
            dtype = self.dtype(block[position].wanted.row)
            parts[position] = device.tensor_over(view).view(dtype)
        self._fill_runs([(block[p], parts[p]) for p in absent if block[p].run is not None])
        self._fill_boxes([(block[p], parts[p]) for p in absent if block[p].run is None])
        found: deque[tuple[int, torch.Tensor]] = deque()
        for segment, part in zip(block, parts, strict=True):
            assert part is not None
            cast = segment.wanted.dtype
            found.append((segment.number, part if cast is None else self._cast(part, cast)))
        return found

    def _cast(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if part.data_ptr() % part.element_size():
            part = part.view(torch.uint8).clone().view(part.dtype)  # files of other writers align nothing
        (view,) = self._cast_memory.places([part.numel() * dtype.itemsize])
        target = device.tensor_over(view).view(dtype).view(part.shape)
        device.copy_into(target, part)
        return target

    def _mapped(self, segment: _Segment) -> torch.Tensor | None:
        view = None if segment.run is None else self._map(segment.run)
        if view is None:
            return None
        assert segment.run is not None
        self._check(segment.wanted.row, segment.run, view)
        return device.tensor_over(view).view(self.dtype(segment.wanted.row))

    def _map(self, run: _Run) -> memoryview | None:
        if not self._maps:
            return None
        view = self._reader.backend.map_range(run.stored.key, _range(run))
        self._maps = view is not None
        return view

    def _check(self, row: int, run: _Run, view: memoryview) -> None:
        if self._checker is not None:
            self._checker.check(run.stored, self.metadata.entries.fqns[row], run.start, view)

    def _fill_runs(self, segments: Sequence[tuple[_Segment, torch.Tensor | None]]) -> None:
        by_key: dict[str, list[tuple[_Segment, _Run, memoryview]]] = {}
        for segment, part in segments:
            assert segment.run is not None and part is not None
            memory = device.host_bytes(part)
            by_key.setdefault(segment.run.stored.key, []).append((segment, segment.run, memory))

        def read(key: str) -> None:
            asked = by_key[key]
            ranges = [_range(run) for _, run, _ in asked]
            self._reader.backend.read_ranges(key, ranges, [memory for _, _, memory in asked])
            for segment, run, memory in asked:
                self._check(segment.wanted.row, run, memory)

        in_parallel(read, list(by_key), threads=_FILES_AT_ONCE if self._reader.backend.remote else 1)

    def _fill_boxes(self, segments: Sequence[tuple[_Segment, torch.Tensor | None]]) -> None:
        targets: dict[MetadataIndex, torch.Tensor] = {}
        items: list[ReadItem] = []
        for segment, part in segments:
            assert segment.box is not None and part is not None
            targets[_index(self.metadata, segment.wanted.row, segment.box)] = part.view(segment.box.sizes)
            items += self._items(segment.wanted.row, segment.box, segment.box)
        planner = FillTargets(lambda item: targets[item.dest_index])
        if self.is_plain:
            # By the engine itself: this checker remembers from block to block what it has compared.
            reads = [self._box_read(item, planner.acquire_tensor(item)) for item in items]
            read_boxes(self._reader.backend, reads, self._checker)
        elif items:
            self._reader.execute_read(LoadPlan.build(items), planner)

    def _box_read(self, item: ReadItem, target: torch.Tensor) -> BoxRead:
        row, (_, sizes) = int(self.metadata.chunks.entry[item.storage_row]), self.metadata.chunks.box(item.storage_row)
        stored = self._extent(row, item.storage_row, sizes)
        box = Box(item.storage_offsets, item.lengths)
        return BoxRead(item.dest_index.fqn, stored, self.dtype(row), sizes, box, target)

    def _extent(self, row: int, chunk_row: int, sizes: tuple[int, ...]) -> StorageInfo:
        """Where a chunk is stored, plainly, once its length is known to fit."""
        stored = self.metadata.storage_info(chunk_row)
        if stored.length != math.prod(sizes) * self.dtype(row).itemsize:
            raise CorruptCheckpointError(
                f"{self.metadata.entries.fqns[row]!r}: {list(sizes)} of {self.metadata.entries.dtype(row)} is not "
                f"{stored.length} bytes; the metadata of {self._reader.backend.url} is damaged."
            )
        return stored


class FillTargets(LoadPlanner):
    """Hands a storage reader the memory for items that were planned elsewhere."""

    def __init__(
        self,
        target_of: Callable[[ReadItem], torch.Tensor],
        take_bytes: Callable[[ReadItem, bytes], None] | None = None,
    ) -> None:
        self._target_of = target_of
        self._take_bytes = take_bytes

    def configure_planner(self, state_dict: object, metadata: Metadata, context: PlannerContext) -> None:
        """Nothing: the items are planned."""

    def build_local_plan(self) -> LoadPlan:
        return LoadPlan.build([])

    def build_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        return list(plans)

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        return view_of_box(self._target_of(item), item.dest_offsets, item.lengths)

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the memory is what counts."""

    def apply_bytes(self, item: ReadItem, data: bytes) -> None:
        assert self._take_bytes is not None
        self._take_bytes(item, data)

    def finish_load(self) -> None:
        """Nothing."""


def row_blocks(box: Box, most: int) -> Iterator[Box]:
    """Parts of `box`, in row-major order, of at most `most` elements; whole rows where they fit.

    >>> [part.sizes for part in row_blocks(Box.whole((5, 4)), 8)]
    [(2, 4), (2, 4), (1, 4)]
    >>> [part.offsets for part in row_blocks(Box.whole((2, 4)), 2)]
    [(0, 0), (0, 2), (1, 0), (1, 2)]
    """
    if box.volume <= most or box.volume <= 1:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.sizes) if size > 1)
    row = box.volume // box.sizes[axis]
    rows = max(1, most // row)
    for start in range(0, box.sizes[axis], rows):
        size = min(rows, box.sizes[axis] - start)
        offsets = (*box.offsets[:axis], box.offsets[axis] + start, *box.offsets[axis + 1 :])
        yield from row_blocks(Box(offsets, (*box.sizes[:axis], size, *box.sizes[axis + 1 :])), most)


def _blocks(segments: Iterable[_Segment]) -> Iterator[list[_Segment]]:
    """Segments that are read together, of at most `STREAM_BYTES` unless there is but one."""
    block: list[_Segment] = []
    held = 0
    for segment in segments:
        if block and held + segment.room > STREAM_BYTES:
            yield block
            block, held = [], 0
        block.append(segment)
        held += segment.room
    if block:
        yield block


def _cut(run: _Run, most: int) -> Iterator[_Run]:
    """The run in parts of at most `most` bytes, cut where checksums end as far as that is a multiple of theirs."""
    position, end = run.start, run.start + run.nbytes
    while position < end:
        stop = min((position // most + 1) * most, end)
        yield _Run(run.stored, position, stop - position)
        position = stop


def _index(metadata: Metadata, row: int, box: Box) -> MetadataIndex:
    owner = int(metadata.entries.owners[row])
    return MetadataIndex(metadata.entries.fqns[row], box.offsets, box.sizes, None if owner < 0 else owner)


def _range(run: _Run) -> ByteRange:
    return ByteRange(run.stored.offset + run.start, run.nbytes)


def _ahead(makers: Iterable[Callable[[], T]], context: contextvars.Context) -> Generator[T, None, None]:
    """What each of `makers` makes, in order; made by a thread of its own, `_AHEAD` of them early."""
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1, "hpdcp-ahead") as pool:
        try:
            for make in makers:
                pending.append(pool.submit(context.run, make))
                if len(pending) > _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


class _Memory:
    """Memory for blocks, used again when nobody holds a view of it any more: fresh memory costs a page fault for every
    4 KiB, 0.4 to 1.3 GB/s where memory that was touched before takes 5 to 6."""

    def __init__(self) -> None:
        # Atomic by itself: memory comes back at any moment, in any thread, also one that is just taking some.
        self._free: deque[_Bytes] = deque(maxlen=_AHEAD + 2)

    def places(self, lengths: Sequence[int]) -> list[memoryview]:
        """Writable memory of each of these lengths."""
        rounded = [math.ceil(length / _ALIGNMENT) * _ALIGNMENT for length in lengths]
        if not rounded:
            return []
        whole = self._lease(sum(rounded)).data
        starts = np.cumsum([0, *rounded]).tolist()
        return [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]

    def _lease(self, nbytes: int) -> _Bytes:
        array = self._taken(nbytes)
        lease = array[:]
        # Every view keeps the lease, so its end is theirs.
        weakref.finalize(lease, self._free.append, array).atexit = False
        return lease

    def _taken(self, nbytes: int) -> _Bytes:
        with contextlib.suppress(IndexError):
            while len(array := self._free.popleft()) < nbytes:
                pass
            return array
        return np.empty(max(nbytes, STREAM_BYTES), np.uint8)
