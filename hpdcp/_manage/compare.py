"""Whether two checkpoints hold the same: the data behind `hpdcp diff`; prints nothing.

Names, shapes and dtypes are compared from the metadata alone. Values, where they are asked for, are streamed from both
sides in the row-major order of each tensor, a few blocks at a time, so that neither layout matters nor size. Either
side may be a checkpoint, of ranks that saved together or each for itself, or a folder of Hugging Face weights.
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from hpdcp._base.errors import HpdcpError, InvalidArgumentError
from hpdcp._base.natural_order import natural_key
from hpdcp._convert.stored_objects import read_objects
from hpdcp._convert.tensor_streams import StreamRequest, TensorStreamer
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata
from hpdcp._manage._value_differences import Flow, Tally
from hpdcp._manage._value_differences import ValueDifference as ValueDifference
from hpdcp._manage.inspect import open_checkpoint
from hpdcp._state import objects
from hpdcp._state.dtypes import itemsize_of
from hpdcp._state.geometry import Box

_OBJECT_BYTES: Final = 32 << 20
"""Python values that are read together have about so many bytes."""
_LONGEST_SHOWN: Final = 60

Progress = Callable[[int, int], None]
_Key = tuple[str, int]
"""(name without the prefix, owner or -1)."""


class Aspect(Enum):
    """In what two names differ."""

    ONLY_IN_A = "only in A"
    ONLY_IN_B = "only in B"
    KIND = "kind"
    """A tensor and a Python value."""
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUES = "values"
    LAYOUT = "layout"
    """Stored in other boxes: saved under another parallel layout."""
    TIES = "ties"
    """Tied to another name on one side only, or to different ones."""
    NESTING = "nesting"
    """Other keys lead to it, as in `{"a.b": 1}` and `{"a": {"b": 1}}`."""


ARRANGEMENT: Final = frozenset({Aspect.LAYOUT, Aspect.TIES, Aspect.NESTING})
"""Differences in how things are stored, not in what."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which one name differs."""

    fqn: str
    """Without the prefix."""
    owner: int | None
    """The rank, for state under `PerRank`."""
    aspect: Aspect
    a: str
    """What it is on that side, for people; empty where there is nothing."""
    b: str
    elements: ValueDifference | None = None
    """For values of tensors."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare_checkpoints` found."""

    url_a: str
    url_b: str
    names: int
    """Names that both have."""
    values: bool
    """Whether values were compared, not only what they are called and shaped like."""
    nbytes: int
    """Bytes of values read and compared, of each side."""
    trusted_nbytes: int
    """Bytes taken for equal, since all their recorded checksums are."""
    seconds: float
    differences: tuple[Difference, ...]
    """By name, numbers by their value."""
    arrangement: tuple[Difference, ...] = ()
    """Differences in how things are stored, where those were not asked for, and in dtypes that are to be ignored: they
    do not count."""
    across_dtypes: bool = False
    """Whether values were compared also where dtypes differ."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing that was compared differs."""
        return not self.differences


def compare_checkpoints(
    a: str | Path,
    b: str | Path,
    *,
    values: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    trust_checksums: bool = False,
    layout: bool = False,
    ignore_dtype: bool = False,
    keys: Sequence[str] = (),
    prefix_a: str = "",
    prefix_b: str = "",
    reader_a: FileSystemReader | None = None,
    reader_b: FileSystemReader | None = None,
    on_progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints; neither is changed.

    Args:
        a, b: folders or URLs.
        values: compare values as well, bit for bit: a NaN equals itself, 0.0 and -0.0 differ.
        rtol, atol: let floating-point and complex numbers differ by up to `atol + rtol * |b|`, also where dtypes
            differ; NaN then equals NaN. Implies `values`.
        trust_checksums: take for equal, unread, what both sides stored in the same boxes with equal checksums: one
            that differs passes with a chance of 1 in 2**32 for each 4 MiB, and damage since the save goes unnoticed.
            Implies `values`.
        layout: how things are stored counts as well: boxes, ties, nesting.
        ignore_dtype: a dtype that differs does not count; numbers are compared as what they are, in a dtype that holds
            those of both sides. An export that was cast has lost digits: give a tolerance as well. Implies `values`.
        keys: only names that match one of these patterns, as a shell matches files, without the prefix.
        prefix_a, prefix_b: only names that begin so, without it: `"model."` to compare with Hugging Face weights.
        reader_a, reader_b: in place of the configured ones.
        on_progress: called with (bytes compared so far, bytes to compare), counted on side A.

    Raises:
        InvalidArgumentError: nothing is left to compare on either side.
        CorruptCheckpointError: a side is damaged; names the file.
        CheckpointError, StorageError: a side cannot be read.
    """
    began = time.perf_counter()
    if rtol < 0 or atol < 0 or not math.isfinite(rtol + atol):
        raise InvalidArgumentError(f"rtol is {rtol}, atol is {atol}; expected finite numbers from 0.")
    if isinstance(keys, str):
        raise InvalidArgumentError(f"keys is {keys!r}; expected a list of patterns, such as [{keys!r}].")
    with ExitStack() as opened:
        side_a, side_b = (
            _Side.open(place, reader, prefix, keys, opened)
            for place, reader, prefix in ((a, reader_a, prefix_a), (b, reader_b, prefix_b))
        )
        if not side_a.rows and not side_b.rows:
            raise InvalidArgumentError(
                f"nothing is left to compare: keys {list(keys)}, prefixes {prefix_a!r} and {prefix_b!r} leave no name "
                f"of {side_a.url} nor of {side_b.url}."
            )
        comparison = _Comparison(
            side_a,
            side_b,
            rtol=rtol,
            atol=atol,
            plain_names=not (prefix_a or prefix_b),
            across_dtypes=ignore_dtype or rtol > 0 or atol > 0,
        )
        comparison.compare_structure()
        values = values or trust_checksums or comparison.across_dtypes
        if values:
            comparison.compare_values(trust_checksums=trust_checksums, on_progress=on_progress)
        found = sorted(comparison.found, key=lambda each: (natural_key(each.fqn), each.owner or 0, each.aspect.value))
        aside = (frozenset() if layout else ARRANGEMENT) | ({Aspect.DTYPE} if ignore_dtype else frozenset())
        return Comparison(
            url_a=side_a.url,
            url_b=side_b.url,
            names=len(comparison.common),
            values=values,
            nbytes=comparison.nbytes,
            across_dtypes=comparison.across_dtypes,
            trusted_nbytes=comparison.trusted_nbytes,
            seconds=time.perf_counter() - began,
            differences=tuple(each for each in found if each.aspect not in aside),
            arrangement=tuple(each for each in found if each.aspect in aside),
        )


@dataclass
class _Side:
    """One of the two checkpoints."""

    reader: FileSystemReader
    metadata: Metadata
    prefix: str
    rows: dict[_Key, int]

    @classmethod
    def open(
        cls, place: str | Path, reader: FileSystemReader | None, prefix: str, keys: Sequence[str], opened: ExitStack
    ) -> _Side:
        reader = reader or FileSystemReader()
        _, found = opened.enter_context(open_checkpoint(place, reader))
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
        return self.reader.backend.url

    def kind(self, row: int) -> EntryKind:
        """Of what is stored for it: a tied name is a tensor."""
        return EntryKind(int(self.metadata.entries.kinds[self.metadata.resolve(row)]))

    def dtype(self, row: int) -> str:
        return self.metadata.entries.dtype(self.metadata.resolve(row))

    def shape(self, row: int) -> tuple[int, ...]:
        return self.metadata.entries.shape(self.metadata.resolve(row))

    def tied_to(self, row: int) -> str:
        """The name it is tied to, without the prefix; empty for none."""
        return self.metadata.entries.targets[row].removeprefix(self.prefix)

    def described(self, row: int) -> str:
        if self.kind(row) is EntryKind.OBJECT:
            return "Python value"
        return f"{self.dtype(row)} [{', '.join(map(str, self.shape(row)))}]"

    def boxes(self, row: int) -> bytes:
        """Equal for two entries exactly when they are stored in the same boxes of tensors of as many dimensions."""
        first, last = self._coordinates(row)
        chunks = self.metadata.chunks
        return chunks.offsets[first:last].tobytes() + chunks.sizes[first:last].tobytes()

    def chunk_count(self, row: int) -> int:
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
        if self.kind(row) is EntryKind.OBJECT:
            rows = self.metadata.chunk_rows(row)
            return int(self.metadata.storage.length[rows[0] : rows[-1] + 1].sum())
        return math.prod(self.shape(row)) * itemsize_of(self.dtype(row))

    def place(self, row: int) -> tuple[int, int]:
        """Where its first chunk lies, to read in the order of files."""
        rows, storage = self.metadata.chunk_rows(row), self.metadata.storage
        return (int(storage.file[rows[0]]), int(storage.offset[rows[0]])) if rows else (-1, -1)


@dataclass
class _Comparison:
    a: _Side
    b: _Side
    rtol: float
    atol: float
    plain_names: bool
    """Whether names are compared as they are, so that the ways to them can be, too."""
    across_dtypes: bool
    """Whether values are compared also where dtypes differ."""
    found: list[Difference] = field(default_factory=list)
    common: dict[_Key, tuple[int, int]] = field(default_factory=dict)
    """Name → rows on both sides."""
    nbytes: int = 0
    trusted_nbytes: int = 0

    @property
    def tolerant(self) -> bool:
        return self.rtol > 0 or self.atol > 0

    def compare_structure(self) -> None:
        a, b = self.a, self.b
        for key, row in a.rows.items():
            if key in b.rows:
                self.common[key] = (row, b.rows[key])
            else:
                self._differ(key, Aspect.ONLY_IN_A, _with_tie(a, row), "")
        for key, row in b.rows.items():
            if key not in a.rows:
                self._differ(key, Aspect.ONLY_IN_B, "", _with_tie(b, row))
        same_paths = self.plain_names and a.metadata.origin == b.metadata.origin
        for key, (row_a, row_b) in self.common.items():
            path_a, path_b = a.metadata.entries.paths[row_a], b.metadata.entries.paths[row_b]
            if same_paths and path_a != path_b:
                self._differ(key, Aspect.NESTING, path_a, path_b)
            if a.kind(row_a) is not b.kind(row_b):
                self._differ(key, Aspect.KIND, a.described(row_a), b.described(row_b))
            elif a.kind(row_a) is not EntryKind.OBJECT:
                self._compare_tensors(key, row_a, row_b)

    def _compare_tensors(self, key: _Key, row_a: int, row_b: int) -> None:
        a, b = self.a, self.b
        if a.dtype(row_a) != b.dtype(row_b):
            self._differ(key, Aspect.DTYPE, a.dtype(row_a), b.dtype(row_b))
        if a.shape(row_a) != b.shape(row_b):
            self._differ(key, Aspect.SHAPE, _shape(a.shape(row_a)), _shape(b.shape(row_b)))
        elif a.boxes(row_a) != b.boxes(row_b):
            self._differ(key, Aspect.LAYOUT, _boxes(a.chunk_count(row_a)), _boxes(b.chunk_count(row_b)))
        if a.tied_to(row_a) != b.tied_to(row_b):
            self._differ(key, Aspect.TIES, a.tied_to(row_a) or "not tied", b.tied_to(row_b) or "not tied")

    def compare_values(self, *, trust_checksums: bool, on_progress: Progress | None) -> None:
        stored = TensorStreamer(self.a.reader, self.a.metadata), TensorStreamer(self.b.reader, self.b.metadata)
        names: dict[tuple[int, int], list[_Key]] = {}
        values: dict[tuple[int, int], _Key] = {}
        for key, (row_a, row_b) in self.common.items():
            pair = self.a.metadata.resolve(row_a), self.b.metadata.resolve(row_b)
            if self.a.kind(row_a) is not self.b.kind(row_b):
                continue
            if trust_checksums and self._checksums_agree(stored, row_a, row_b):
                if pair not in names:
                    self.trusted_nbytes += self.a.nbytes(row_a)
                names.setdefault(pair, [])  # nothing to tell of it
            elif self.a.kind(row_a) is EntryKind.OBJECT:
                values[pair] = key
            elif self.a.shape(row_a) == self.b.shape(row_b) and (
                self.across_dtypes or self.a.dtype(row_a) == self.b.dtype(row_b)
            ):
                names.setdefault(pair, []).append(key)
        tensors = sorted((pair for pair, keys in names.items() if keys), key=lambda pair: self.a.place(pair[0]))
        total = sum(self.a.nbytes(row) for row, _ in [*tensors, *values])

        def advance(nbytes: int) -> None:
            self.nbytes += nbytes
            if on_progress is not None:
                on_progress(self.nbytes, total)

        self._compare_objects(values, advance)
        for pair, difference in self._streamed(stored, tensors, advance):
            for key in names[pair]:
                row_a, row_b = self.common[key]
                self._differ(key, Aspect.VALUES, self.a.described(row_a), self.b.described(row_b), difference)

    def _checksums_agree(self, stored: tuple[TensorStreamer, TensorStreamer], row_a: int, row_b: int) -> bool:
        a, b = self.a, self.b
        if a.kind(row_a) is EntryKind.TENSOR and (
            not all(side.is_plain for side in stored)
            or a.dtype(row_a) != b.dtype(row_b)
            or a.shape(row_a) != b.shape(row_b)
            or a.boxes(row_a) != b.boxes(row_b)
        ):
            return False
        recorded = a.checksums(row_a)
        return bool(recorded) and recorded == b.checksums(row_b)

    def _compare_objects(self, pairs: Mapping[tuple[int, int], _Key], advance: Callable[[int], None]) -> None:
        batch: list[tuple[int, int]] = []
        held = 0
        for number, pair in enumerate(pairs, start=1):
            batch.append(pair)
            held += self.a.nbytes(pair[0]) + self.b.nbytes(pair[1])
            if held < _OBJECT_BYTES and number < len(pairs):
                continue
            found_a = read_objects(self.a.reader, self.a.metadata, [row for row, _ in batch])
            found_b = read_objects(self.b.reader, self.b.metadata, [row for _, row in batch])
            for row_a, row_b in batch:
                data_a, data_b = found_a[row_a], found_b[row_b]
                if data_a != data_b and not self._close_enough(data_a, data_b):
                    self._differ(pairs[row_a, row_b], Aspect.VALUES, _shown(data_a), _shown(data_b))
                advance(len(data_a))
            batch, held = [], 0

    def _close_enough(self, a: bytes, b: bytes) -> bool:
        """Whether both are numbers that the tolerance lets pass."""
        if not self.tolerant:
            return False
        x, y = _decoded(a), _decoded(b)
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (x, y)):
            return False
        if isinstance(x, int) and isinstance(y, int):
            return False  # they differ, and a count is exact
        if math.isfinite(x) and math.isfinite(y):
            return bool(abs(x - y) <= self.atol + self.rtol * abs(y))
        return bool(x == y) or (math.isnan(x) and math.isnan(y))

    def _streamed(
        self,
        stored: tuple[TensorStreamer, TensorStreamer],
        pairs: Sequence[tuple[int, int]],
        advance: Callable[[int], None],
    ) -> Iterator[tuple[tuple[int, int], ValueDifference]]:
        """Those of the pairs whose elements differ, and how."""
        wanted_a = [StreamRequest(row, Box.whole(self.a.metadata.entries.shape(row))) for row, _ in pairs]
        wanted_b = [StreamRequest(row, Box.whole(self.b.metadata.entries.shape(row))) for _, row in pairs]
        stored[0].check(wanted_a)
        stored[1].check(wanted_b)
        with closing(stored[0].stream(wanted_a)) as parts_a, closing(stored[1].stream(wanted_b)) as parts_b:
            flow_a, flow_b = Flow(parts_a), Flow(parts_b)
            for pair, each in zip(pairs, wanted_a, strict=True):
                tally = Tally(each.box.sizes, self.rtol, self.atol)
                position = 0
                while position < each.box.volume:
                    count = min(flow_a.ready(), flow_b.ready())
                    some, others = flow_a.take(count), flow_b.take(count)
                    tally.compare(position, some, others)
                    position += count
                    advance(count * some.element_size())
                difference = tally.result()
                if difference is not None:
                    yield pair, difference

    def _differ(self, key: _Key, aspect: Aspect, a: str, b: str, elements: ValueDifference | None = None) -> None:
        fqn, owner = key
        self.found.append(Difference(fqn, None if owner < 0 else owner, aspect, a, b, elements))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _boxes(count: int) -> str:
    return f"{count} box{'' if count == 1 else 'es'}"


def _with_tie(side: _Side, row: int) -> str:
    tied = side.tied_to(row)
    return side.described(row) + (f", tied to {tied}" if tied else "")


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
