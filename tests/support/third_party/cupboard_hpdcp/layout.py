"""One file for each item, its bytes and nothing else: written against the contract alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import crc32c
import torch

from hpdcp.backend import Backend, ByteRange
from hpdcp.errors import CorruptCheckpointError
from hpdcp.layout import FileNaming, Layout, Verify
from hpdcp.metadata import HEAD_BYTES, Metadata, StorageInfo
from hpdcp.planner import EntryKind, LoadPlanner, ReadItem, SavePlan, SavePlanner
from hpdcp.storage import FileRecord, WriteResult, WriteResults, block_checksums, byte_pieces


class DrawersLayout(Layout):
    name: ClassVar[str] = "drawers"

    def __init__(self) -> None:
        self._written: list[str] = []

    def written(self) -> list[str]:
        return list(self._written)

    def write(self, backend: Backend, plan: SavePlan, planner: SavePlanner, naming: FileNaming) -> WriteResults:
        results, files = [], []
        for item in plan.items:
            if item.kind is EntryKind.OBJECT:
                data = planner.get_bytes(item)
            else:
                data = b"".join(byte_pieces(planner.get_tensor(item)))
            key = naming.key(".drawer", len(self._written))
            self._written.append(key)
            backend.write(key, [memoryview(data)], size=len(data), exclusive=backend.conditional_create)
            checksums = tuple(block_checksums(iter([memoryview(data)])))
            results.append(WriteResult(StorageInfo(key, 0, len(data), checksums)))
            files.append(FileRecord(key, len(data), crc32c.crc32c(data[:HEAD_BYTES])))
        return WriteResults.build(results, files)

    def check(self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem]) -> None:
        for item in items:
            info = metadata.storage_info(item.storage_row)
            if backend.size(info.key) != info.length:
                raise CorruptCheckpointError(f"{info.key} in {backend.url} is not as long as it was.")

    def read(
        self, backend: Backend, metadata: Metadata, items: Sequence[ReadItem], planner: LoadPlanner, verify: Verify
    ) -> None:
        for item in items:
            info = metadata.storage_info(item.storage_row)
            data = bytearray(info.length)
            backend.read_ranges(info.key, [ByteRange(0, len(data))], [memoryview(data)])
            if list(block_checksums(iter([memoryview(data)]))) != list(info.checksums):
                raise CorruptCheckpointError(f"{info.key} in {backend.url} is damaged.")
            if item.kind is EntryKind.OBJECT:
                planner.apply_bytes(item, bytes(data))
                continue
            entry = metadata.entries[int(metadata.chunks.entry[item.storage_row])]
            _, sizes = metadata.chunks.box(item.storage_row)
            stored = torch.frombuffer(data, dtype=getattr(torch, entry.dtype)).reshape(sizes)
            box = tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.acquire_tensor(item)
            target.copy_(stored[box])
            planner.apply_tensor(item, target)
