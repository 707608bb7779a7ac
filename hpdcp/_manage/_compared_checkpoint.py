"""One of the two checkpoints that are compared: what its entries are, and how they are stored."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hpdcp._files.reader import FileSystemReader
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata
from hpdcp._manage._comparison import EntryKey
from hpdcp._manage._opening import open_checkpoint
from hpdcp._state.dtypes import itemsize_of


@dataclass
class ComparedCheckpoint:
    """One of the two checkpoints."""

    reader: FileSystemReader
    metadata: Metadata
    prefix: str
    rows: dict[EntryKey, int]

    @classmethod
    def open(
        cls,
        checkpoint_id: str | Path,
        reader: FileSystemReader | None,
        prefix: str,
        keys: Sequence[str],
        opened: ExitStack,
    ) -> ComparedCheckpoint:
        """The entries whose names begin with the prefix and match one of `keys`; `opened` closes the reader."""
        reader = reader or FileSystemReader()
        _, found = opened.enter_context(open_checkpoint(checkpoint_id, reader))
        metadata = found.metadata
        owners = metadata.entries.owners.tolist()
        rows = {
            (name, owner): row
            for row, (fqn, owner) in enumerate(zip(metadata.entries.fqns, owners, strict=True))
            if fqn.startswith(prefix) and _matches(name := fqn.removeprefix(prefix), keys)
        }
        return cls(reader, metadata, prefix, rows)

    @property
    def url(self) -> str:
        """The folder or URL, for messages."""
        return self.reader.backend.url

    def kind(self, row: int) -> EntryKind:
        """Of what is stored for it: a tied name is a tensor."""
        return EntryKind(int(self.metadata.entries.kinds[self.metadata.resolve(row)]))

    def dtype(self, row: int) -> str:
        """torch's name."""
        return self.metadata.entries.dtype(self.metadata.resolve(row))

    def shape(self, row: int) -> tuple[int, ...]:
        """The global shape."""
        return self.metadata.entries.shape(self.metadata.resolve(row))

    def tied_to(self, row: int) -> str:
        """The name it is tied to, without the prefix; empty for none."""
        return self.metadata.entries.targets[row].removeprefix(self.prefix)

    def described(self, row: int) -> str:
        """For people: dtype and shape of a tensor."""
        if self.kind(row) is EntryKind.OBJECT:
            return "Python value"
        return f"{self.dtype(row)} {shape_text(self.shape(row))}"

    def boxes(self, row: int) -> bytes:
        """Equal for two entries exactly when they are stored in the same boxes of tensors of as many dimensions."""
        first, last = self._coordinates(row)
        chunks = self.metadata.chunks
        return chunks.offsets[first:last].tobytes() + chunks.sizes[first:last].tobytes()

    def chunk_count(self, row: int) -> int:
        """In how many boxes it is stored."""
        return len(self.metadata.chunk_rows(row))

    def _coordinates(self, row: int) -> tuple[int, int]:
        rows, ends = self.metadata.chunk_rows(row), self.metadata.chunks.ends
        if not rows:
            return 0, 0
        return int(ends[rows[0] - 1]) if rows[0] else 0, int(ends[rows[-1]])

    def checksums(self, row: int) -> bytes:
        """Of all that is stored for it, with the lengths; empty where none were recorded."""
        rows, storage = self.metadata.chunk_rows(row), self.metadata.storage
        if not rows or not self.metadata.has_checksums:
            return b""
        start = int(storage.crc_ends[rows[0] - 1]) if rows[0] else 0
        crcs = storage.crcs[start : int(storage.crc_ends[rows[-1]])]
        return storage.length[rows[0] : rows[-1] + 1].tobytes() + crcs.tobytes()

    def nbytes(self, row: int) -> int:
        """Of the value: elements of a tensor, or the stored bytes of a Python value."""
        if self.kind(row) is EntryKind.OBJECT:
            rows = self.metadata.chunk_rows(row)
            return int(self.metadata.storage.length[rows[0] : rows[-1] + 1].sum())
        return math.prod(self.shape(row)) * itemsize_of(self.dtype(row))

    def position(self, row: int) -> tuple[int, int]:
        """Where its first chunk lies (file, byte), to read in the order of files."""
        rows, storage = self.metadata.chunk_rows(row), self.metadata.storage
        return (int(storage.file[rows[0]]), int(storage.offset[rows[0]])) if rows else (-1, -1)


def shape_text(shape: Sequence[int]) -> str:
    """A shape, as torch writes it."""
    return f"[{', '.join(map(str, shape))}]"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
