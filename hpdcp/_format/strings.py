"""Columns of strings."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._base.errors import CorruptCheckpointError

_ROWS_PER_SEARCH: Final = 32
"""Rows of a column that become keys of a table in the time of one binary search in it."""


def fits(ends: npt.NDArray[np.int64], total: int) -> bool:
    """Whether runs may end there, one after another, that make up so many values.

    >>> fits(np.array([2, 2, 5]), 5), fits(np.array([3, 2, 5]), 5), fits(np.array([2, 4]), 5)
    (True, False, False)
    """
    if not len(ends):
        return total == 0
    return int(ends[-1]) == total and int(ends[0]) >= 0 and not (ends[1:] < ends[:-1]).any()


@dataclass(frozen=True, slots=True, eq=False)
class StringColumn:
    """A column of strings as two arrays, so that a million of them cost no million objects.

    Lone surrogates are kept (`surrogatepass`). A string that cannot be decoded is a CorruptCheckpointError naming
    `where`, raised when it is asked for.
    """

    blob: npt.NDArray[np.uint8]
    """All strings, UTF-8, one after the other."""
    ends: npt.NDArray[np.int64]
    """Where each string ends in `blob`."""
    where: str = "a string column"

    def __post_init__(self) -> None:
        blob, ends = self.blob, self.ends
        if blob.dtype != np.uint8 or ends.dtype != np.int64 or blob.ndim != 1 or ends.ndim != 1:
            raise CorruptCheckpointError(
                f"{self.where}: expected U8 bytes and I64 ends of one dimension, found {blob.dtype} {blob.shape} "
                f"and {ends.dtype} {ends.shape}."
            )
        if not fits(ends, len(blob)):
            raise CorruptCheckpointError(
                f"{self.where}: the ends of its {len(ends)} strings do not fit {len(blob)} bytes."
            )

    @classmethod
    def from_strings(cls, strings: Iterable[str]) -> StringColumn:
        """A column of `strings`, in their order."""
        texts = [*strings]
        joined = "".join(texts)
        if joined.isascii():
            lengths, data = map(len, texts), joined.encode("ascii")
        else:
            encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
            lengths, data = map(len, encoded), b"".join(encoded)
        ends = np.cumsum(np.fromiter(lengths, np.int64, len(texts)), dtype=np.int64)
        return cls(np.frombuffer(data, np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        count = len(self.ends)
        row = index + count if index < 0 else index
        if not 0 <= row < count:
            raise IndexError(f"{self.where} has {count} strings, and no string {index}.")
        return self._decode(self._bytes(row))

    def __iter__(self) -> Iterator[str]:
        data = self.blob.tobytes()
        start = 0
        if data.isascii():
            text = data.decode("ascii")
            for end in self.ends.tolist():
                yield text[start:end]
                start = end
            return
        for end in self.ends.tolist():
            yield self._decode(data[start:end])
            start = end

    def find(self, text: str) -> int | None:
        """The first row that holds `text`, None if none does; the column must be sorted (as `sorted` sorts strings).

        >>> StringColumn.from_strings(["a", "b.c", "é"]).find("b.c")
        1
        """
        wanted = text.encode("utf-8", "surrogatepass")
        # Bytes of UTF-8 sort as code points do, which is how Python sorts strings; surrogatepass keeps that.
        row = bisect_left(range(len(self.ends)), wanted, key=self._bytes)
        return row if row < len(self.ends) and self._bytes(row) == wanted else None

    def find_all(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """For each of `texts` the row that `find` gives, -1 for None.

        >>> StringColumn.from_strings(["a", "b.c", "b.c", "d"]).find_all(["d", "b", "b.c"]).tolist()
        [3, -1, 1]
        """
        count = len(self.ends)
        if len(texts) * _ROWS_PER_SEARCH < count:
            found: Iterable[int | None] = map(self.find, texts)
        else:
            data, ends = self.blob.tobytes(), self.ends.tolist()
            starts = itertools.chain((0,), ends)
            # From the last row on, so that of equal strings the first one stays.
            slices = [data[start:end] for start, end in zip(starts, ends, strict=False)]
            rows = dict(zip(reversed(slices), range(count - 1, -1, -1), strict=True))
            found = (rows.get(text.encode("utf-8", "surrogatepass")) for text in texts)
        return np.fromiter((-1 if row is None else row for row in found), np.int64, len(texts))

    def _bytes(self, row: int) -> bytes:
        start = int(self.ends[row - 1]) if row else 0
        return self.blob[start : int(self.ends[row])].tobytes()

    def _decode(self, data: bytes) -> str:
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptCheckpointError(f"{self.where}: a string is not UTF-8 ({error}).") from None
