"""In what values two checkpoints differ: Python values by their stored bytes, tensors streamed from both sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, TypeAlias

from hpdcp._base.errors import HpdcpError
from hpdcp._base.splitting import batches
from hpdcp._convert.stored_objects import read_objects
from hpdcp._convert.tensor_streams import StreamRequest, TensorStreamer
from hpdcp._format.columns import EntryKind
from hpdcp._manage._compared_checkpoint import ComparedCheckpoint
from hpdcp._manage._comparison import Aspect, ComparisonOptions, Difference, EntryKey
from hpdcp._manage._value_differences import Flow, Tally, ValueDifference
from hpdcp._state import objects
from hpdcp._state.geometry import Box

_OBJECT_BYTES: Final = 32 << 20
"""Python values that are read together have at most so many bytes, unless one alone has more."""
_LONGEST_SHOWN: Final = 60

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes compared so far, and of all that are to be compared."""
_Rows: TypeAlias = tuple[int, int]
"""Of what is stored on both sides: names that are tied share them."""


class ValueComparison:
    """Compares the values that both sides store under common names; each is read once, however many names it has."""

    def __init__(
        self,
        a: ComparedCheckpoint,
        b: ComparedCheckpoint,
        common: Mapping[EntryKey, tuple[int, int]],
        options: ComparisonOptions,
    ) -> None:
        self._a = a
        self._b = b
        self._common = common
        self._options = options
        self.nbytes = 0
        """Bytes of values read and compared, of each side."""
        self.trusted_nbytes = 0
        """Bytes taken for equal, since all their recorded checksums are."""

    def differences(self, on_progress: Progress | None) -> Iterator[Difference]:
        """One for each name whose values differ."""
        streamers = tuple(TensorStreamer(side.reader, side.metadata) for side in (self._a, self._b))
        python_values: dict[_Rows, EntryKey] = {}
        tensors: dict[_Rows, list[EntryKey]] = {}
        trusted: set[_Rows] = set()
        plain = all(streamer.is_plain for streamer in streamers)
        for key, (row_a, row_b) in self._common.items():
            rows = self._a.metadata.resolve(row_a), self._b.metadata.resolve(row_b)
            if self._a.kind(row_a) is not self._b.kind(row_b):
                continue
            if self._options.trust_checksums and self._checksums_agree(row_a, row_b, plain=plain):
                trusted.add(rows)
            elif self._a.kind(row_a) is EntryKind.OBJECT:
                python_values[rows] = key
            elif self._comparable(row_a, row_b):
                tensors.setdefault(rows, []).append(key)
        self.trusted_nbytes = sum(self._a.nbytes(row) for row, _ in trusted)
        total = sum(self._a.nbytes(row) for row, _ in [*tensors, *python_values])

        def advance(nbytes: int) -> None:
            self.nbytes += nbytes
            if on_progress is not None:
                on_progress(self.nbytes, total)

        yield from self._compare_objects(python_values, advance)
        in_file_order = sorted(tensors, key=lambda rows: self._a.position(rows[0]))
        for rows, found in self._compare_tensors(streamers, in_file_order, advance):
            for key in tensors[rows]:
                a, b = (side.described(row) for side, row in zip((self._a, self._b), self._common[key], strict=True))
                yield Difference.of(key, Aspect.VALUES, a, b, found)

    def _comparable(self, row_a: int, row_b: int) -> bool:
        same_dtype = self._options.across_dtypes or self._a.dtype(row_a) == self._b.dtype(row_b)
        return same_dtype and self._a.shape(row_a) == self._b.shape(row_b)

    def _checksums_agree(self, row_a: int, row_b: int, *, plain: bool) -> bool:
        a, b = self._a, self._b
        if a.kind(row_a) is EntryKind.TENSOR and (
            not plain
            or a.dtype(row_a) != b.dtype(row_b)
            or a.shape(row_a) != b.shape(row_b)
            or a.boxes(row_a) != b.boxes(row_b)
        ):
            return False
        recorded = a.checksums(row_a)
        return bool(recorded) and recorded == b.checksums(row_b)

    def _compare_objects(self, keys: Mapping[_Rows, EntryKey], advance: Callable[[int], None]) -> Iterator[Difference]:
        def nbytes(rows: _Rows) -> int:
            return self._a.nbytes(rows[0]) + self._b.nbytes(rows[1])

        for batch in batches(keys, nbytes, _OBJECT_BYTES):
            found_a = read_objects(self._a.reader, self._a.metadata, [row for row, _ in batch])
            found_b = read_objects(self._b.reader, self._b.metadata, [row for _, row in batch])
            for rows in batch:
                a, b = found_a[rows[0]], found_b[rows[1]]
                if a != b and not self._close_enough(a, b):
                    yield Difference.of(keys[rows], Aspect.VALUES, _shown(a), _shown(b))
                advance(len(a))

    def _close_enough(self, a: bytes, b: bytes) -> bool:
        """Whether both are numbers that the tolerance lets pass."""
        if not self._options.is_tolerant:
            return False
        x, y = _decoded(a), _decoded(b)
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (x, y)):
            return False
        if isinstance(x, int) and isinstance(y, int):
            return False  # they differ, and a count is exact
        if math.isfinite(x) and math.isfinite(y):
            return bool(abs(x - y) <= self._options.atol + self._options.rtol * abs(y))
        return bool(x == y) or (math.isnan(x) and math.isnan(y))

    def _compare_tensors(
        self,
        streamers: Sequence[TensorStreamer],
        pairs: Sequence[_Rows],
        advance: Callable[[int], None],
    ) -> Iterator[tuple[_Rows, ValueDifference]]:
        """Those of the pairs whose elements differ, and how."""
        shapes = [self._a.shape(row) for row, _ in pairs]
        requests_a = [StreamRequest(row, Box.whole(shape)) for (row, _), shape in zip(pairs, shapes, strict=True)]
        requests_b = [StreamRequest(row, Box.whole(shape)) for (_, row), shape in zip(pairs, shapes, strict=True)]
        streamer_a, streamer_b = streamers
        streamer_a.check(requests_a)
        streamer_b.check(requests_b)
        with closing(streamer_a.stream(requests_a)) as stream_a, closing(streamer_b.stream(requests_b)) as stream_b:
            flow_a, flow_b = Flow(stream_a), Flow(stream_b)
            for rows, shape in zip(pairs, shapes, strict=True):
                tally = Tally(shape, self._options.rtol, self._options.atol)
                position, volume = 0, math.prod(shape)
                while position < volume:
                    count = min(flow_a.ready(), flow_b.ready())
                    some, others = flow_a.take(count), flow_b.take(count)
                    tally.compare(position, some, others)
                    position += count
                    advance(count * some.element_size())
                found = tally.result()
                if found is not None:
                    yield rows, found


def _decoded(data: bytes) -> Any:
    """A stored Python value; None where reading it would need more than data."""
    try:
        return objects.decode(data, key="", allow_pickle=False)
    except HpdcpError:
        return None


def _shown(data: bytes) -> str:
    """A stored Python value in a few words."""
    value = _decoded(data)
    text = repr(value) if value is not None or data == b"null" else f"{len(data)} bytes"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"
