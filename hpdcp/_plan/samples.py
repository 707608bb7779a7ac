"""Which bytes of a box stand for all of it, where comparing all would cost as much as writing it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from hpdcp._devices.samples import Span
from hpdcp._format.metadata import MetadataIndex

SAMPLE_BYTES: Final = 64 << 10
"""Compared of each box; all of one that is no larger."""
_END_BYTES: Final = 8 << 10
"""Of which at the start, and as much at the end."""
_BLOCK_BYTES: Final = 4 << 10
_BLOCKS: Final = (SAMPLE_BYTES - 2 * _END_BYTES) // _BLOCK_BYTES
"""Between the ends, one in each of as many ranges of equal length."""
_PLACES: Final = struct.Struct(f"<{_BLOCKS}L")
_ALIGNMENT: Final = 16
"""Of a block's start: the widest element's size, complex128."""


def sample_spans(index: MetadataIndex, nbytes: int) -> Sequence[Span]:
    """The bytes to compare of the box `index`, which takes `nbytes`: the same on every rank, in every save.

    The first, the last, and blocks between them whose places depend on the name and the box.

    >>> sample_spans(MetadataIndex("w", (0,), (8,)), 32)
    [(0, 32)]
    """
    if nbytes <= SAMPLE_BYTES:
        return [(0, nbytes)]
    seed = f"{index.fqn}|{index.offsets}|{index.sizes}".encode("utf-8", "surrogatepass")
    inner = nbytes - 2 * _END_BYTES
    spans = [(0, _END_BYTES)]
    for block, drawn in enumerate(_PLACES.unpack(hashlib.blake2b(seed, digest_size=_PLACES.size).digest())):
        begin, end = inner * block // _BLOCKS, inner * (block + 1) // _BLOCKS
        free = end - begin - _BLOCK_BYTES - _ALIGNMENT
        start = _END_BYTES + begin + (drawn % (free + 1) if free > 0 else 0)
        start -= start % _ALIGNMENT
        spans.append((start, start + _BLOCK_BYTES))
    spans.append((nbytes - _END_BYTES, nbytes))
    return spans
