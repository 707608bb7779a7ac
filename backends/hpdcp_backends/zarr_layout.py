"""The zarr layout: each tensor is one array of a zarr hierarchy, version 3, which any reader of zarr opens.

    zarr.json                      the root group
    model/zarr.json                a group for each dict on the way
    model/layers.0.weight/zarr.json
    model/layers.0.weight/c/0/0    one chunk of it, as one rank holds it
    _rank0_.<attempt>.bytes        rank 0's Python values, as in the default layout
    .metadata                      what hpdcp reads: where each chunk is, and its checksums

Chunks are the ranks' own boxes where these make a regular grid of chunks that are not too small. Elsewhere a chunk is
written by one of the ranks that hold boxes of it, and the others first send theirs through the storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np
import torch

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CorruptCheckpointError, InvalidArgumentError
from hpdcp._base.splitting import batches
from hpdcp._devices import device
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._files.block_checker import BlockChecker
from hpdcp._files.box_reads import BoxRead
from hpdcp._files.layout import FileNaming, Layout, Verify
from hpdcp._files.parallel import in_parallel
from hpdcp._files.read_engine import read_boxes, read_extents
from hpdcp._files.safetensors_layout import SafetensorsLayout, check_files
from hpdcp._format.columns import EntryKind, EntryTable
from hpdcp._format.metadata import Metadata, StorageInfo
from hpdcp._plan.load_plan import ReadItem
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.read_targets import ReadTargets
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import FileRecord, WriteResults
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.geometry import Box, relative
from hpdcp._state.views import view_of_box
from hpdcp_backends._zarr import groups as foreign
from hpdcp_backends._zarr.arrange import arrange, itemsize_of, paths_of, steps_of
from hpdcp_backends._zarr.codecs import Compression, decode
from hpdcp_backends._zarr.metadata import FORMAT, NODE, ZARR_NAMES, array_document, chunk_key, group_document
from hpdcp_backends._zarr.names import is_fixed_name, is_root
from hpdcp_backends._zarr.write import Chunk, ChunkWriter

_BATCH_BYTES: Final = 64 << 20
"""Of chunks that are put together at a time."""
_DECODERS_REMOTE: Final = 8
_DECODERS_LOCAL: Final = 2


class ZarrLayout(Layout):
    """Each tensor is an array of zarr, which any of its readers opens; it cannot be saved over.

    Args:
        compressor: `none`, or `zstd`: each chunk is compressed, by zarr's codec `blosc`.
        level: how hard it tries, 0 to 9.
        shuffle: whether the bytes of wider elements are sorted by their position in the element first, which is what
            makes floating-point numbers compressible at all.
    """

    name: ClassVar[str] = "zarr"
    redistributes: ClassVar[bool] = True
    needs_all_ranks: ClassVar[bool] = True

    def __init__(self, *, compressor: str = "none", level: int = 3, shuffle: bool = True) -> None:
        self.settings = Compression(compressor, level, shuffle).settings
        self._objects = SafetensorsLayout()
        self._written: list[str] = []

    def written(self) -> list[str]:
        return [*self._objects.written(), *self._written]

    @classmethod
    def recognizes(cls, keys: Collection[str]) -> bool:
        return is_root(keys)

    @classmethod
    def is_fixed_name(cls, key: str) -> bool:
        return is_fixed_name(key)

    @classmethod
    def foreign_metadata(cls, backend: Backend) -> Metadata:
        return foreign.group_metadata(backend)

    def arrange(
        self, plans: Sequence[SavePlan], metadata: Metadata, locals_: Sequence[SavePlan]
    ) -> tuple[Sequence[SavePlan], Metadata]:
        return arrange(plans, metadata)

    def roots(self, tables: Sequence[EntryTable]) -> frozenset[str]:
        found = {NODE}
        seen: set[bytes] = set()
        for table in tables:
            content = table.paths.blob.tobytes() + table.owners.tobytes()
            if content not in seen:
                seen.add(content)
                found.update(path.partition("/")[0] for _, path in paths_of(table))
        return frozenset(found)

    def redistribute(self, backend: Backend, plan: SavePlan, planner: SavePlanner, naming: FileNaming) -> None:
        sent = plan.sent_plan()
        if not len(sent):
            return

        def pieces() -> Iterator[memoryview]:
            done = 0
            for rows in planner.waves(sent):
                if rows.tolist() != list(range(done, done + len(rows))):
                    raise InvalidArgumentError(
                        f"{type(planner).__name__}.waves gives rows out of order; what is sent has one order."
                    )
                done += len(rows)
                # A wave's memory is used again by the next, while the backend may not have written it yet.
                at_once = len(rows) == len(sent)
                items = sent.select(rows).items
                planner.expect(items)
                for item in items:
                    for part in planner.get_parts(item):
                        for piece in byte_pieces(part):
                            yield piece if at_once else memoryview(bytes(piece))

        key = _sent_key(naming.rank, naming.attempt)
        self._written.append(key)
        backend.write(key, pieces(), size=int(sent.nbytes.sum()), exclusive=backend.conditional_create)

    def write(self, backend: Backend, plan: SavePlan, planner: SavePlanner, naming: FileNaming) -> WriteResults:
        kinds = plan.entries.kinds[plan.chunks.entry]
        objects = np.flatnonzero(kinds == EntryKind.OBJECT)
        tensors = np.flatnonzero(kinds == EntryKind.TENSOR)
        parts: list[tuple[np.ndarray[tuple[int], np.dtype[np.int64]], WriteResults]] = []
        if len(objects) or not len(plan):
            parts.append((objects, self._objects.write(backend, plan.select(objects), planner, naming)))
        if len(tensors):
            parts.append((tensors, self._write_tensors(backend, plan.select(tensors), planner, naming)))
        return parts[0][1] if len(parts) == 1 else WriteResults.reunited(parts)

    def _write_tensors(
        self, backend: Backend, plan: SavePlan, planner: SavePlanner, naming: FileNaming
    ) -> WriteResults:
        nodes = dict(paths_of(plan.entries))
        compression = Compression.of(self.settings)
        writer = ChunkWriter(backend, self._written.append)
        try:
            chunks = [_chunk(plan, nodes, row, compression) for row in range(len(plan))]
            for row in range(len(plan)):
                if not any(plan.chunks.box(row)[0]):
                    self._describe(
                        writer, plan.entries, int(plan.chunks.entry[row]), nodes, chunks[row].steps, compression
                    )
            together = set(plan.received_rows().tolist())
            for batch in batches(sorted(together), lambda row: chunks[row].nbytes, _BATCH_BYTES):
                for row, tensor in self._put_together(backend, plan, batch, chunks, naming):
                    writer.write(row, chunks[row], [tensor])
            held = [row for row in range(len(plan)) if row not in together]
            items = [plan.item(row) for row in held]
            planner.expect(items)
            for row, item in zip(held, items, strict=True):
                writer.write(row, chunks[row], planner.get_parts(item))
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        done = [writer.written[row] for row in range(len(plan))]
        return WriteResults.build(
            [each.stored for each in done],
            [each.file for each in done] + writer.documents,
            None if all(each.stored == each.original for each in done) else [each.original for each in done],
        )

    @staticmethod
    def _describe(
        writer: ChunkWriter,
        entries: EntryTable,
        row: int,
        nodes: Mapping[int, str],
        steps: tuple[int, ...],
        compression: Compression | None,
    ) -> None:
        dtype, itemsize = entries.dtype(row), itemsize_of(entries, row)
        codecs = [] if compression is None else [compression.document(_itemsize_on_disk(dtype, itemsize))]
        about = {"hpdcp": {"dtype": dtype, "fqn": entries.fqns[row], "path": entries.paths[row]}}
        document = array_document(dtype, entries.shape(row), steps, itemsize, codecs, about)
        writer.write_document(f"{nodes[row]}/{NODE}", document)

    def _put_together(
        self, backend: Backend, plan: SavePlan, rows: Sequence[int], chunks: Sequence[Chunk], naming: FileNaming
    ) -> list[tuple[int, torch.Tensor]]:
        """Chunks made of what ranks have sent."""
        redistribution = plan.redistribution
        assert redistribution is not None
        memory = {row: device.empty_on_host(chunks[row].sizes, chunks[row].dtype) for row in rows}
        reads: list[BoxRead] = []
        for number in np.flatnonzero(np.isin(redistribution.item, rows)).tolist():
            row = int(redistribution.item[number])
            box = Box(*redistribution.received.box(number))
            inside = relative(box, Box(*plan.chunks.box(row)))
            target = view_of_box(memory[row], inside.offsets, inside.sizes)
            key = _sent_key(int(redistribution.sender[number]), naming.attempt)
            dtype = chunks[row].dtype
            info = StorageInfo(key, int(redistribution.offset[number]), box.volume * dtype.itemsize, ())
            fqn = plan.entries.fqns[int(plan.chunks.entry[row])]
            reads.append(BoxRead(fqn, info, dtype, box.sizes, Box.whole(box.sizes), target))
        read_boxes(backend, reads, None)
        return list(memory.items())

    def finish(self, backend: Backend, metadata: Metadata, attempt: str) -> Sequence[FileRecord]:
        entries = metadata.entries
        nodes = dict(paths_of(entries))
        writer = ChunkWriter(backend, self._written.append)
        try:
            compression = Compression.of(metadata.settings)
            described = set(metadata.chunks.entry.tolist())
            for row in nodes.keys() - described:
                steps = tuple(max(1, size) for size in entries.shape(row))
                self._describe(writer, entries, row, nodes, steps, compression)
            groups = {
                "/".join(steps[:depth])
                for path in nodes.values()
                for steps in [path.split("/")]
                for depth in range(1, len(steps))
            }
            for group in sorted(groups):
                writer.write_document(f"{group}/{NODE}", group_document({}))
            tied = {path: entries.targets[row] for row, path in paths_of(entries, EntryKind.ALIAS)}
            about = {**FORMAT, "attempt": attempt, "world_size": metadata.world_size, "tied": tied}
            writer.write_document(NODE, group_document({"hpdcp": about}))
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        suffix = _sent_key(0, attempt).partition(".")[2]
        backend.delete([info.key for info in backend.list_keys() if info.key.endswith(f".{suffix}")])
        return writer.documents

    def check(self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem]) -> None:
        check_files(backend, metadata, {int(metadata.storage.file[item.storage_row]) for item in items})

    def read(
        self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem], targets: ReadTargets, verify: Verify
    ) -> None:
        if metadata.origin == foreign.ORIGIN:
            foreign.read(backend, metadata, items, targets)
            return
        objects = [item for item in items if item.kind is EntryKind.OBJECT]
        self._objects.read(backend, metadata, objects, targets, verify)
        tensors = [item for item in items if item.kind is not EntryKind.OBJECT]
        reads = [_box_read(metadata, item, targets) for item in tensors]
        if Compression.of(metadata.settings) is None:
            wanted = verify is Verify.ALWAYS or (verify is Verify.AUTO and backend.remote)
            checker = BlockChecker(backend, partial_blocks=verify is Verify.ALWAYS) if wanted else None
            read_boxes(backend, reads, checker)
        else:
            _read_compressed(
                backend, reads, None if verify is Verify.NEVER else BlockChecker(backend, partial_blocks=False)
            )
        for item, read in zip(tensors, reads, strict=True):
            targets.apply_tensor(item, read.target)


def _sent_key(rank: int, attempt: str) -> str:
    """Where a rank puts what others write; the name bears the attempt, as all files do that a killed save may leave."""
    return FileNaming(rank, attempt).key(".handed")


def _itemsize_on_disk(dtype: str, itemsize: int) -> int:
    return itemsize if dtype in ZARR_NAMES else 1


def _chunk(plan: SavePlan, nodes: Mapping[int, str], row: int, compression: Compression | None) -> Chunk:
    entry = int(plan.chunks.entry[row])
    name = plan.entries.dtype(entry)
    dtype = dtype_of(name)
    offsets, sizes = plan.chunks.box(row)
    steps = steps_of(plan, entry)
    key = chunk_key(nodes[entry], offsets, steps, deeper=name not in ZARR_NAMES)
    return Chunk(key, dtype, sizes, steps, compression)


def _box_read(metadata: Metadata, item: ReadItem, targets: ReadTargets) -> BoxRead:
    stored = metadata.storage_info(item.storage_row)
    entry = int(metadata.chunks.entry[item.storage_row])
    _, sizes = metadata.chunks.box(item.storage_row)
    fqn, name = item.dest_index.fqn, metadata.entries.dtype(entry)
    dtype = dtype_of(name, fqn=fqn)
    compressed = Compression.of(metadata.settings) is not None
    if compressed or stored.length != torch.Size(sizes).numel() * dtype.itemsize:
        # Filled up where the tensor ends: the object holds as much as the grid's first one.
        _, sizes = metadata.chunks.box(metadata.chunk_rows(entry)[0])
        if not compressed and stored.length != torch.Size(sizes).numel() * dtype.itemsize:
            raise CorruptCheckpointError(
                f"{fqn!r}: {list(sizes)} of {name} is not {stored.length} bytes; .metadata is damaged."
            )
    return BoxRead(fqn, stored, dtype, sizes, Box(item.storage_offsets, item.lengths), targets.acquire_tensor(item))


def _read_compressed(backend: Backend, reads: Sequence[BoxRead], checker: BlockChecker | None) -> None:
    """Fill every target from chunks that are decompressed whole, each once."""
    by_key: dict[str, list[BoxRead]] = {}
    for read in reads:
        by_key.setdefault(read.stored.key, []).append(read)

    def work(key: str) -> None:
        first = by_key[key][0]
        (data,) = read_extents(backend, [first.stored])
        if checker is not None:
            checker.check(first.stored, first.fqn, 0, memoryview(data))
        memory = np.empty(torch.Size(first.sizes).numel() * first.dtype.itemsize, dtype=np.uint8)
        try:
            decode(data, memory)
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{key!r} in {backend.url}, of {first.fqn!r}, is damaged: {error}. Load another checkpoint; targets "
                "read so far are undefined."
            ) from error
        whole = device.tensor_over(memory.data).view(first.dtype).view(first.sizes)
        for read in by_key[key]:
            device.copy_into(read.target, view_of_box(whole, read.box.offsets, read.box.sizes))

    in_parallel(work, list(by_key), threads=_DECODERS_REMOTE if backend.remote else _DECODERS_LOCAL)
