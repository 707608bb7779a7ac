"""Stored tensors as streams: what a conversion or a comparison reads, in order, in blocks of bounded size.

A tensor whose stored chunks follow one another in its own row-major order (one file's tensor, rows shared among ranks,
a ragged one) is read as the byte ranges it consists of: views of the file where the backend maps, else memory that is
used again. Any other is put together block of rows by block of rows, through the path that loads take.

One thread reads ahead: while a block is written, the next ones are on their way.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Final, TypeAlias

import torch

from hpdcp._base import config
from hpdcp._base.errors import CheckpointReplacedError
from hpdcp._base.splitting import batches
from hpdcp._convert._read_ahead import ReusedMemory, read_ahead
from hpdcp._convert._stream_plan import ChunkRange, StreamPlanner, StreamStep
from hpdcp._convert._stream_plan import StreamRequest as StreamRequest
from hpdcp._devices import device
from hpdcp._files import registry
from hpdcp._files.block_checker import BlockChecker
from hpdcp._files.box_reads import BoxRead
from hpdcp._files.layout import Verify
from hpdcp._files.parallel import in_parallel
from hpdcp._files.read_engine import read_boxes
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan.load_plan import LoadPlan, ReadItem
from hpdcp._plan.planner import PlannerContext
from hpdcp._state.geometry import Box
from hpdcp._state.views import view_of_box

STREAM_BYTES: Final = 32 << 20
"""Most that a block holds, unless one row is larger; a multiple of `checksums.BLOCK_BYTES`, so that few
checksums are split."""
_FILES_AT_ONCE: Final = 4
"""Files of one block that are read at a time across a network."""

TensorStream: TypeAlias = Generator[tuple[int, torch.Tensor], None, None]
"""(which request, some of its elements), one after another in row-major order."""


class TensorStreamer:
    """Streams the tensors of one checkpoint, from any layout of ranks, or of a Hugging Face folder.

    Whatever checksums are on record are compared, unless the configuration's `verify` is "never": what comes out of a
    conversion has none, or new ones, so this is the last moment at which damage shows.

    Args:
        as_a_load: compare only what a load would, so that what is mapped is not read before somebody wants it.
    """

    def __init__(self, reader: FileSystemReader, metadata: Metadata, *, as_a_load: bool = False) -> None:
        self.reader: Final = reader
        self.metadata: Final = metadata
        layout = registry.find_layout(metadata.settings.get("layout", "safetensors"))
        self._planner = StreamPlanner(metadata, reader.backend.url, is_plain=layout().plain_extents)
        self._memory = ReusedMemory(STREAM_BYTES)
        self._cast_memory = ReusedMemory(STREAM_BYTES)
        # From here, where no bar is shown yet: one counts what is written, not what is read for it as well.
        self._context = contextvars.copy_context()
        self._maps = True
        verify = Verify(config.current().verify)
        skipped = verify is Verify.NEVER or (as_a_load and verify is Verify.AUTO and not reader.backend.remote)
        checked = metadata.has_checksums and not skipped
        self._checker = BlockChecker(reader.backend, partial_blocks=True) if checked else None
        reader.configure_reader(metadata, PlannerContext(0, 1, is_coordinator=False, collective=False))
        self._versions = None if metadata.has_checksums else self._files_now()

    @property
    def is_plain(self) -> bool:
        """Whether what is stored of a tensor is its elements and nothing else."""
        return self._planner.is_plain

    def dtype(self, row: int) -> torch.dtype:
        """Of the entry.

        Raises:
            UnsupportedTypeError: this torch has no such dtype.
        """
        return self._planner.dtype(row)

    def check(self, requests: Iterable[StreamRequest]) -> None:
        """Raise unless all that is requested is there: dtypes, every box, the files and how they begin.

        Raises:
            UnsupportedTypeError, CoverageError, CorruptCheckpointError, KeyNotFoundError: naming the key.
        """
        one_of_file: dict[int, ReadItem] = {}
        for request in requests:
            self.dtype(request.row)
            self._planner.check_coverage(request)
            for item in self._planner.read_items(request.row, request.box):
                one_of_file.setdefault(int(self.metadata.storage.file[item.storage_row]), item)
        self.reader.optimize_local_plan(LoadPlan.build(list(one_of_file.values())))

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
                f"{self.reader.backend.url}: {changed[0]!r} was changed while it was read, so what was read may be a "
                "mixture. Convert again."
            )

    def _files_now(self) -> dict[str, tuple[int, float]]:
        known = set(self.metadata.files)
        listing = self.reader.backend.list_keys()
        return {info.key: (info.size, info.modified) for info in listing if info.key in known}

    def stream(self, requests: Sequence[StreamRequest]) -> TensorStream:
        """The elements of each, in order.

        Blocks are made ahead of time. A tensor's memory is only ever read, and used again once nobody holds it.
        """
        steps = (
            step
            for number, request in enumerate(requests)
            for step in self._planner.steps(number, request, STREAM_BYTES)
        )
        makers = (partial(self._read, batch) for batch in batches(steps, attrgetter("room"), STREAM_BYTES))
        with closing(read_ahead(makers, self._context.copy())) as ready:
            for block in ready:
                while block:
                    yield block.popleft()

    def whole(self, request: StreamRequest) -> torch.Tensor:
        """All of it at once, in memory of its own unless it can be mapped; only to be read."""
        only = self._planner.only_range(request)
        mapped = None if only is None else self._map(only)
        if only is not None and mapped is not None:
            self._check(request.row, only, mapped)
            return device.tensor_over(mapped).view(self.dtype(request.row)).view(request.box.sizes)
        target = device.empty_on_host(request.box.sizes, request.dtype or self.dtype(request.row))
        self.fill([(request, target)])
        return target

    def fill(
        self, targets: Sequence[tuple[StreamRequest, torch.Tensor]], on_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        """Copy each into its tensor, contiguous memory of the host; `on_bytes` is told of each so many bytes."""
        at = [0] * len(targets)
        for number, part in self.stream([request for request, _ in targets]):
            flat = targets[number][1].view(-1)
            device.copy_into(flat[at[number] : at[number] + part.numel()], part.view(-1))
            at[number] += part.numel()
            on_bytes(part.numel() * part.element_size())

    def mapped_privately(
        self, request: StreamRequest, map_key: Callable[[str], memoryview | None]
    ) -> torch.Tensor | None:
        """A tensor over a private map of the one file that holds it, for its owner to change; None where there is none.

        `map_key` gives the map of a file. None also where the bytes are not aligned for the dtype.
        """
        only = self._planner.only_range(request)
        view = None if only is None else map_key(only.stored.key)
        if only is None or view is None or len(view) < only.in_file.stop:
            return None
        part = view[only.in_file.offset : only.in_file.stop]
        flat = device.tensor_over(part)
        if flat.data_ptr() % self.dtype(request.row).itemsize:
            return None
        self._check(request.row, only, part)
        return flat.view(self.dtype(request.row)).view(request.box.sizes)

    def _read(self, batch: Sequence[StreamStep]) -> deque[tuple[int, torch.Tensor]]:
        """One block: a tensor for each step."""
        with self.reader.missing_files_explained():
            parts: list[torch.Tensor | None] = [self._mapped(step) for step in batch]
            absent = [position for position, part in enumerate(parts) if part is None]
            memory = self._memory.allocate([batch[position].nbytes for position in absent])
            read: list[tuple[StreamStep, torch.Tensor]] = []
            for position, view in zip(absent, memory, strict=True):
                step = batch[position]
                part = device.tensor_over(view).view(self.dtype(step.request.row))
                parts[position] = part
                read.append((step, part))
            self._read_ranges([(step, part) for step, part in read if step.range is not None])
            self._read_boxes([(step, part) for step, part in read if step.range is None])
        block: deque[tuple[int, torch.Tensor]] = deque()
        for step, filled in zip(batch, parts, strict=True):
            assert filled is not None
            cast = step.request.dtype
            block.append((step.number, filled if cast is None else self._cast(filled, cast)))
        return block

    def _cast(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        (view,) = self._cast_memory.allocate([part.numel() * dtype.itemsize])
        target = device.tensor_over(view).view(dtype).view(part.shape)
        device.copy_into(target, aligned(part))
        return target

    def _mapped(self, step: StreamStep) -> torch.Tensor | None:
        view = None if step.range is None else self._map(step.range)
        if view is None:
            return None
        assert step.range is not None
        self._check(step.request.row, step.range, view)
        return device.tensor_over(view).view(self.dtype(step.request.row))

    def _map(self, part: ChunkRange) -> memoryview | None:
        if not self._maps:
            return None
        view = self.reader.backend.map_range(part.stored.key, part.in_file)
        self._maps = view is not None
        return view

    def _check(self, row: int, part: ChunkRange, view: memoryview) -> None:
        if self._checker is not None:
            self._checker.check(part.stored, self.metadata.entries.fqns[row], part.start, view)

    def _read_ranges(self, steps: Sequence[tuple[StreamStep, torch.Tensor]]) -> None:
        by_key: dict[str, list[tuple[int, ChunkRange, memoryview]]] = {}
        for step, part in steps:
            assert step.range is not None
            asked = by_key.setdefault(step.range.stored.key, [])
            asked.append((step.request.row, step.range, device.host_bytes(part)))

        def read(key: str) -> None:
            asked = by_key[key]
            ranges = [part.in_file for _, part, _ in asked]
            self.reader.backend.read_ranges(key, ranges, [memory for _, _, memory in asked])
            for row, part, memory in asked:
                self._check(row, part, memory)

        in_parallel(read, list(by_key), threads=_FILES_AT_ONCE if self.reader.backend.remote else 1)

    def _read_boxes(self, steps: Sequence[tuple[StreamStep, torch.Tensor]]) -> None:
        targets: dict[MetadataIndex, torch.Tensor] = {}
        items: list[ReadItem] = []
        for step, part in steps:
            assert step.box is not None
            targets[self._planner.index(step.request.row, step.box)] = part.view(step.box.sizes)
            items += self._planner.read_items(step.request.row, step.box)
        filled = _BoxTargets(targets)
        if self.is_plain:
            # By the engine itself: this checker remembers from block to block what it has compared.
            reads = [self._box_read(item, filled.acquire_tensor(item)) for item in items]
            read_boxes(self.reader.backend, reads, self._checker)
        elif items:
            self.reader.execute_read(LoadPlan.build(items), filled)

    def _box_read(self, item: ReadItem, target: torch.Tensor) -> BoxRead:
        row, (_, sizes) = int(self.metadata.chunks.entry[item.storage_row]), self.metadata.chunks.box(item.storage_row)
        stored = self._planner.extent(row, item.storage_row, sizes)
        box = Box(item.storage_offsets, item.lengths)
        return BoxRead(item.dest_index.fqn, stored, self.dtype(row), sizes, box, target)


class _BoxTargets:
    """Lets a storage reader fill boxes that are put together here."""

    def __init__(self, targets: Mapping[MetadataIndex, torch.Tensor]) -> None:
        self._targets = targets

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        return view_of_box(self._targets[item.dest_index], item.dest_offsets, item.lengths)

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the memory is what counts."""

    def apply_bytes(self, item: ReadItem, data: bytes) -> None:
        raise AssertionError(f"{item.dest_index} is a tensor")


def aligned(part: torch.Tensor) -> torch.Tensor:
    """The same elements where torch may compute with them: files of other writers align nothing."""
    if part.data_ptr() % part.element_size() == 0:
        return part
    return part.view(torch.uint8).clone().view(part.dtype)
