"""Bytes that were read, compared with the checksums on record."""

from __future__ import annotations

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._format.checksums import block_span, blocks_between, checksum
from hpdcp._format.metadata import StorageInfo


class BlockChecker:
    """Compares blocks of stored extents with their checksums."""

    def __init__(self, backend: Backend, *, partial_blocks: bool) -> None:
        self._backend = backend
        self._partial_blocks = partial_blocks
        self._checked: set[tuple[str, int, int, int]] = set()
        """(key, first byte, byte past the last, checksum): two rows may record the same bytes, and not alike."""

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
            compared = (stored.key, stored.offset + low, stored.offset + high, stored.checksums[block])
            if compared in self._checked:
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
            self._checked.add(compared)
