"""One safetensors file about to be written: a header that is known first, then bytes from the tensors' own memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from typing import Final

import numpy as np

from hpdcp._devices.byte_pieces import VIEW_BYTES, byte_pieces
from hpdcp._devices.downloads import Downloads
from hpdcp._devices.memory import memory_at
from hpdcp._files._extents import Extents
from hpdcp._files.layout import FileNaming
from hpdcp._format.checksums import BlockChecksums, checksum, head_mark
from hpdcp._format.columns import I64, EntryKind, ends_of
from hpdcp._format.container import build_header
from hpdcp._format.metadata import StorageTable
from hpdcp._format.strings import StringColumn
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.write_results import WriteResults

_SHORTEST_RUN: Final = 16
"""So many items in a row with addresses are written without a call for each. Fewer go with their neighbours, whose
copies from a device would else be waited for at each of them."""


class DataFile:
    """The bytes of one file, and once they have gone by, where each item lies and its checksums.

    Args:
        downloads: shared by all files of a rank, written one after another.
    """

    def __init__(
        self,
        naming: FileNaming,
        suffix: str,
        part: int,
        extents: Extents,
        planner: SavePlanner,
        downloads: Downloads[int],
    ) -> None:
        self.key: Final = naming.key(suffix, part)
        self._naming = naming
        self._part = f"{part}{suffix}"
        self._extents = extents
        self._planner = planner
        self._downloads = downloads
        self._checksums: list[list[int]] = []
        """Of each extent so far, of its blocks."""

    @cached_property
    def _header(self) -> tuple[bytes, list[int]]:
        # The attempt comes first: `commit.attempt_in_header` and the file's mark look at the first bytes only.
        return build_header(
            self._extents.entries,
            {
                "attempt": self._naming.attempt,
                "rank": str(self._naming.rank),
                "part": self._part,
                "chunks": f"[{','.join(self._extents.about)}]",
            },
        )

    @property
    def size(self) -> int:
        """The whole file's length in bytes."""
        return len(self._header[0]) + int(self._extents.plan.nbytes.sum())

    def pieces(self) -> Iterator[memoryview]:
        """The file's bytes in order, checksummed as they go by."""
        plan = self._extents.plan
        yield memoryview(self._header[0])
        # What has no bytes has no checksum either.
        addresses = np.where(plan.nbytes > 0, self._planner.get_addresses(plan), 0)
        self._planner.expect(plan.items)
        for start, stop, with_addresses in _runs(addresses):
            yield from self._in_memory(addresses, start, stop) if with_addresses else self._asked_for(start, stop)

    def results(self) -> WriteResults:
        """Where each extent was stored, in their order."""
        header, starts = self._header
        nbytes = self._extents.plan.nbytes
        return WriteResults(
            StorageTable(
                file=np.zeros(len(nbytes), dtype=np.int32),
                offset=np.array(starts, dtype=np.int64),
                length=nbytes,
                crc_ends=ends_of(np.fromiter(map(len, self._checksums), dtype=np.int64, count=len(nbytes))),
                crcs=np.fromiter(itertools.chain.from_iterable(self._checksums), dtype=np.uint32),
                file_names=StringColumn.from_strings([self.key]),
                file_sizes=np.array([self.size], dtype=np.int64),
                file_marks=np.array([head_mark(header)], dtype=np.uint32),
            )
        )

    def _in_memory(self, addresses: I64, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of extents whose addresses are known."""
        spans = zip(addresses[start:stop].tolist(), self._extents.plan.nbytes[start:stop].tolist(), strict=True)
        for address, nbytes in spans:
            memory = memory_at(address, nbytes)
            if nbytes <= VIEW_BYTES:
                self._checksums.append([checksum(memory)])
                yield memory
            else:
                running = BlockChecksums()
                for begin in range(0, nbytes, VIEW_BYTES):
                    piece = memory[begin : begin + VIEW_BYTES]
                    running.add(piece)
                    yield piece
                self._checksums.append(running.finish())
            self._downloads.count(nbytes)

    def _asked_for(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of extents that the planner is asked for one by one."""
        for number, pieces in itertools.groupby(self._parts(range(start, stop)), itemgetter(0)):
            # An item without bytes has no piece, and none of its parts comes by.
            self._checksums += [[]] * (number - len(self._checksums))
            running = BlockChecksums()
            for _, piece in pieces:
                running.add(piece)
                yield piece
            self._checksums.append(running.finish())
        self._checksums += [[]] * (stop - len(self._checksums))

    def _parts(self, numbers: range) -> Iterator[tuple[int, memoryview]]:
        """The extents' bytes in order, each piece with its extent."""
        plan, planner = self._extents.plan, self._planner
        kinds = plan.entries.kinds[plan.chunks.entry]
        if len(numbers) and kinds[numbers[0]] == EntryKind.OBJECT:
            yield from ((number, memoryview(planner.get_bytes(plan.item(number)))) for number in numbers)
            return
        parts = ((number, part) for number in numbers for part in planner.get_parts(plan.item(number)))
        for number, part in self._downloads.on_host(parts):
            for piece in byte_pieces(part):
                yield number, piece


def _runs(addresses: I64) -> Iterator[tuple[int, int, bool]]:
    """Where the extents are in memory whose addresses are known, and where they are not: (start, stop, are they)."""
    known = addresses != 0
    bounds = [0, *(np.flatnonzero(known[1:] != known[:-1]) + 1).tolist(), len(known)]
    start = 0
    for begin, end in itertools.pairwise(bounds):
        whole = begin == 0 and end == len(known)
        if end > begin and known[begin] and (whole or end - begin >= _SHORTEST_RUN):
            if begin > start:
                yield start, begin, False
            yield begin, end, True
            start = end
    if start < len(known):
        yield start, len(known), False
