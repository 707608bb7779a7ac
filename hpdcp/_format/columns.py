"""Plans and metadata as columns: names on record, and chunks of them.

Ten million chunks are a few numpy arrays here, not ten million objects; a row becomes an object when somebody
asks for it. Everything is immutable by convention: `take` makes a new table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, TypeAlias, TypeVar, cast

import crc32c
import numpy as np
import numpy.typing as npt

from hpdcp._format.strings import StringColumn, fits

I64: TypeAlias = npt.NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)
Columns: TypeAlias = Mapping[str, npt.NDArray[np.generic]]


_BLOCK_ROWS: Final = 1 << 16


class EntryKind(IntEnum):
    """What a name on record stands for."""

    TENSOR = 0
    OBJECT = 1
    ALIAS = 2
    """The same tensor as another name's (`Entry.target`): tied weights, stored once."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name on record."""

    fqn: str
    path: str
    """The typed path that restores keys and nesting, as `paths.encode_path` writes it."""
    kind: EntryKind
    dtype: str = ""
    """torch's name of the dtype, such as "bfloat16"; empty for objects."""
    shape: tuple[int, ...] = ()
    """Global shape; empty for objects."""
    owner: int | None = None
    """The rank, for state under `PerRank`."""
    target: str = ""
    """For an alias, the fqn that stores the bytes."""
    position: int = 0
    """Where it came in the state dict that it was saved from, counted over all names: the order of keys."""


def ends_of(lengths: I64) -> I64:
    """Where each run ends when runs of these lengths lie one after another."""
    return np.cumsum(lengths, dtype=np.int64)


def starts_of(ends: I64) -> I64:
    """Where each run starts, given where each ends."""
    starts = np.empty_like(ends)
    starts[:1] = 0
    starts[1:] = ends[:-1]
    return starts


def take_runs(ends: I64, order: npt.NDArray[np.integer]) -> tuple[I64, I64]:
    """The new ends, and the positions of all values, when runs are picked in `order`."""
    starts = starts_of(ends)[order]
    lengths = ends[order] - starts
    new_ends = ends_of(lengths)
    within = np.arange(int(new_ends[-1]) if len(new_ends) else 0, dtype=np.int64)
    within -= np.repeat(starts_of(new_ends), lengths)
    return new_ends, np.repeat(starts, lengths) + within


def take_strings(column: StringColumn, order: npt.NDArray[np.integer]) -> StringColumn:
    """The strings of `column` in `order`."""
    ends = ends_of((column.ends - starts_of(column.ends))[order])
    blob = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    filled = 0
    # In blocks, since a position takes eight times the memory of the byte it stands for.
    for start in range(0, len(order), _BLOCK_ROWS):
        _, positions = take_runs(column.ends, order[start : start + _BLOCK_ROWS])
        blob[filled : filled + len(positions)] = column.blob[positions]
        filled += len(positions)
    return StringColumn(blob, ends)


def _ints(values: Iterable[int]) -> I64:
    return np.fromiter(values, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class EntryTable:
    """Names on record, one row for each (fqn, owner)."""

    fqns: StringColumn
    paths: StringColumn
    kinds: npt.NDArray[np.uint8]
    dtype_codes: npt.NDArray[np.int32]
    """Position in `dtype_names`."""
    dtype_names: StringColumn
    owners: I64
    """-1 where the state is shared."""
    targets: StringColumn
    shape_ends: I64
    shape_dims: I64
    positions: I64
    """The order of the names in the state dict; all 0 where it was not recorded."""

    @classmethod
    def from_entries(cls, entries: Sequence[Entry]) -> EntryTable:
        names = sorted({entry.dtype for entry in entries})
        code = {name: i for i, name in enumerate(names)}
        return cls(
            fqns=StringColumn.from_strings([entry.fqn for entry in entries]),
            paths=StringColumn.from_strings([entry.path for entry in entries]),
            kinds=np.array([entry.kind for entry in entries], dtype=np.uint8),
            dtype_codes=np.array([code[entry.dtype] for entry in entries], dtype=np.int32),
            dtype_names=StringColumn.from_strings(names),
            owners=_ints(-1 if entry.owner is None else entry.owner for entry in entries),
            targets=StringColumn.from_strings([entry.target for entry in entries]),
            shape_ends=ends_of(_ints(len(entry.shape) for entry in entries)),
            shape_dims=_ints(dim for entry in entries for dim in entry.shape),
            positions=_ints(entry.position for entry in entries),
        )

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, row: int) -> Entry:
        owner = int(self.owners[row])
        return Entry(
            fqn=self.fqns[row],
            path=self.paths[row],
            kind=EntryKind(int(self.kinds[row])),
            dtype=self.dtype(row),
            shape=self.shape(row),
            owner=None if owner < 0 else owner,
            target=self.targets[row],
            position=int(self.positions[row]),
        )

    def names(self) -> list[str]:
        """Each row's fqn, a character for every byte of its UTF-8: cheap to make, and sorts as fqns do."""
        text, starts = self.fqns.blob.tobytes().decode("latin-1"), starts_of(self.fqns.ends)
        return [text[start:end] for start, end in zip(starts.tolist(), self.fqns.ends.tolist(), strict=True)]

    def dtype(self, row: int) -> str:
        """torch's name of the dtype of `row`."""
        return self.dtype_names[int(self.dtype_codes[row])]

    def shape(self, row: int) -> tuple[int, ...]:
        """The global shape of `row`."""
        start = int(self.shape_ends[row - 1]) if row else 0
        return tuple(self.shape_dims[start : int(self.shape_ends[row])].tolist())

    def position_key(self, row: int) -> tuple[int, int]:
        """Sorts rows in the order of the state dict; in their own where that was not recorded."""
        return int(self.positions[row]), row

    def ndims(self) -> I64:
        """Number of dimensions of each row; 0 for objects."""
        return self.shape_ends - starts_of(self.shape_ends)

    def volumes(self) -> I64:
        """Number of elements of each row's global shape; 1 for objects."""
        return _products(self.shape_dims, self.shape_ends)

    def to_columns(self, prefix: str = "entry.") -> dict[str, npt.NDArray[np.generic]]:
        """Named arrays, from which `from_columns` makes the table again."""
        return {
            f"{prefix}fqn.blob": self.fqns.blob,
            f"{prefix}fqn.ends": self.fqns.ends,
            f"{prefix}path.blob": self.paths.blob,
            f"{prefix}path.ends": self.paths.ends,
            f"{prefix}kind": self.kinds,
            f"{prefix}dtype": self.dtype_codes,
            f"{prefix}dtype_name.blob": self.dtype_names.blob,
            f"{prefix}dtype_name.ends": self.dtype_names.ends,
            f"{prefix}owner": self.owners,
            f"{prefix}target.blob": self.targets.blob,
            f"{prefix}target.ends": self.targets.ends,
            f"{prefix}shape.ends": self.shape_ends,
            f"{prefix}shape.dims": self.shape_dims,
            f"{prefix}position": self.positions,
        }

    @classmethod
    def from_columns(cls, columns: Columns, prefix: str = "entry.") -> EntryTable:
        return cls(
            fqns=strings_from(columns, f"{prefix}fqn"),
            paths=strings_from(columns, f"{prefix}path"),
            kinds=column(columns, f"{prefix}kind", np.uint8),
            dtype_codes=column(columns, f"{prefix}dtype", np.int32),
            dtype_names=strings_from(columns, f"{prefix}dtype_name"),
            owners=column(columns, f"{prefix}owner", np.int64),
            targets=strings_from(columns, f"{prefix}target"),
            shape_ends=column(columns, f"{prefix}shape.ends", np.int64),
            shape_dims=column(columns, f"{prefix}shape.dims", np.int64),
            # Since version 1.2.
            positions=column(columns, f"{prefix}position", np.int64)
            if f"{prefix}position" in columns
            else np.zeros(len(columns[f"{prefix}kind"]), dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Boxes on record, each of one row of an `EntryTable`; an object's only row has no coordinates."""

    entry: I64
    """Row in the entry table."""
    ends: I64
    """Where each row's coordinates end in `offsets` and `sizes`."""
    offsets: I64
    sizes: I64

    @classmethod
    def from_boxes(cls, entry: Sequence[int], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> ChunkTable:
        return cls(
            entry=_ints(entry),
            ends=ends_of(_ints(len(offsets) for offsets, _ in boxes)),
            offsets=_ints(x for offsets, _ in boxes for x in offsets),
            sizes=_ints(x for _, sizes in boxes for x in sizes),
        )

    def __len__(self) -> int:
        return len(self.entry)

    def box(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, sizes) of `row`."""
        start, end = int(self.ends[row - 1]) if row else 0, int(self.ends[row])
        return tuple(self.offsets[start:end].tolist()), tuple(self.sizes[start:end].tolist())

    def volumes(self) -> I64:
        """Number of elements of each row; 1 for objects and 0-dim tensors."""
        return _products(self.sizes, self.ends)

    def take(self, order: npt.NDArray[np.integer]) -> ChunkTable:
        """The rows in `order`, entry rows unchanged."""
        ends, positions = take_runs(self.ends, order)
        return ChunkTable(self.entry[order], ends, self.offsets[positions], self.sizes[positions])

    def rows(self, start: int, stop: int) -> ChunkTable:
        """Rows `start` to `stop`, as views."""
        first = int(self.ends[start - 1]) if start else 0
        last = int(self.ends[stop - 1]) if stop > start else first
        ends = self.ends[start:stop] - first
        return ChunkTable(self.entry[start:stop], ends, self.offsets[first:last], self.sizes[first:last])

    def with_entry(self, entry: I64) -> ChunkTable:
        """The same boxes, of other entry rows."""
        return ChunkTable(entry, self.ends, self.offsets, self.sizes)

    def sort_keys(self) -> list[I64]:
        """Columns that order rows by (entry, offsets, sizes); two rows are one box exactly when all are equal.

        As few as 64 bits allow, since each one more is a sort of its own.
        """
        starts = starts_of(self.ends)
        ndims = self.ends - starts
        widest = int(ndims.max(initial=0))
        keys: list[I64] = []
        span = 0
        for column in self._columns_by_axis(ndims, starts, widest):
            radix = int(column.max(initial=0)) + 2
            if keys and span * radix < 1 << 63:
                keys[-1] = keys[-1] * radix + (column + 1)
                span *= radix
            else:
                keys.append(column + 1)
                span = radix
        return keys

    def _columns_by_axis(self, ndims: I64, starts: I64, widest: int) -> Iterator[I64]:
        """The entry, then each axis' offset, then each axis' size; -1 where a row has no such axis."""
        yield self.entry
        for values in (self.offsets, self.sizes):
            for axis in range(widest):
                has = ndims > axis
                column = np.full(len(ndims), -1, dtype=np.int64)
                column[has] = values[starts[has] + axis]
                yield column

    def to_columns(self, prefix: str = "chunk.") -> dict[str, npt.NDArray[np.generic]]:
        """Named arrays, from which `from_columns` makes the table again."""
        return {
            f"{prefix}entry": self.entry,
            f"{prefix}ends": self.ends,
            f"{prefix}offsets": self.offsets,
            f"{prefix}sizes": self.sizes,
        }

    @classmethod
    def from_columns(cls, columns: Columns, prefix: str = "chunk.") -> ChunkTable:
        return cls(
            entry=column(columns, f"{prefix}entry", np.int64),
            ends=column(columns, f"{prefix}ends", np.int64),
            offsets=column(columns, f"{prefix}offsets", np.int64),
            sizes=column(columns, f"{prefix}sizes", np.int64),
        )


def group_tables(tables: Sequence[EntryTable]) -> tuple[list[int], list[int]]:
    """For each rank's table its group, and for each group its first rank. Tables of a group are equal row for row, but
    that each rank owns what is under its own `PerRank`.

    Most ranks have the same names on record: what is worked out for one table then holds for all of its group.
    """
    alike: dict[int, list[int]] = {}
    columns: list[list[npt.NDArray[np.generic]]] = []
    first: list[int] = []
    group: list[int] = []
    for rank, table in enumerate(tables):
        mine = [
            *replace(table, owners=np.where(table.owners == rank, np.int64(-2), table.owners)).to_columns().values()
        ]
        crc = 0
        for values in mine:
            crc = crc32c.crc32c(np.ascontiguousarray(values).data, crc)
        candidates = alike.setdefault(crc, [])
        found = next((other for other in candidates if all(map(np.array_equal, mine, columns[other]))), len(first))
        if found == len(first):
            candidates.append(found)
            columns.append(mine)
            first.append(rank)
        group.append(found)
    return group, first


def concat_chunks(tables: Sequence[ChunkTable]) -> ChunkTable:
    """The rows of all tables, one after another."""
    if not tables:
        return ChunkTable.from_boxes([], [])
    lengths = [table.ends - starts_of(table.ends) for table in tables]
    return ChunkTable(
        entry=np.concatenate([table.entry for table in tables]),
        ends=ends_of(np.concatenate(lengths)),
        offsets=np.concatenate([table.offsets for table in tables]),
        sizes=np.concatenate([table.sizes for table in tables]),
    )


def sort_order(keys: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.intp]:
    """The stable order by the first key, ties by the next."""
    return np.lexsort(tuple(reversed(keys)))


def group_starts(keys: Sequence[npt.NDArray[np.generic]], order: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """True where a row, read in `order`, differs from the one before it in any key."""
    first = np.zeros(len(order), dtype=np.bool_)
    first[:1] = True
    for key in keys:
        ordered = key[order]
        first[1:] |= ordered[1:] != ordered[:-1]
    return first


def first_rows(chunks: ChunkTable) -> I64:
    """For each row the first one that is the same box of the same entry."""
    keys = chunks.sort_keys()
    order = sort_order(keys)
    first = group_starts(keys, order)
    rows = np.empty(len(chunks), dtype=np.int64)
    rows[order] = order[first][np.cumsum(first) - 1]
    return rows


def strings_to(columns: dict[str, npt.NDArray[np.generic]], name: str, values: StringColumn) -> None:
    """Put `values` into `columns` under `name`."""
    columns[f"{name}.blob"] = values.blob
    columns[f"{name}.ends"] = values.ends


def strings_from(columns: Columns, name: str) -> StringColumn:
    """The string column that `strings_to` put under `name`; KeyError or ValueError when it is not a sound one."""
    blob, ends = column(columns, f"{name}.blob", np.uint8), column(columns, f"{name}.ends", np.int64)
    if not fits(ends, len(blob)):
        raise ValueError(f"column {name} does not end where its text ends")
    return StringColumn(blob, ends)


def column(columns: Columns, name: str, dtype: type[Number]) -> npt.NDArray[Number]:
    """The one-dimensional column `name`; KeyError when there is none, ValueError when its type is another."""
    found = columns[name]
    if found.dtype != np.dtype(dtype) or found.ndim != 1:
        raise ValueError(f"column {name} is {found.dtype}[{found.ndim}-d], expected {np.dtype(dtype)}[1-d]")
    return cast("npt.NDArray[Number]", found)


def _products(values: I64, ends: I64) -> I64:
    """The product of each run of `values`; 1 for an empty run."""
    lengths = ends - starts_of(ends)
    out = np.ones(len(ends), dtype=np.int64)
    some = lengths > 0
    if some.any():
        # reduceat needs starts of non-empty runs only; empty runs own no values, so the rest is still contiguous
        out[some] = np.multiply.reduceat(values, starts_of(ends)[some])
    return out
