"""The safetensors container, by hand: a JSON header, then bytes without holes.

Data files, objects files and `.metadata` are all this one format, so that any reader of safetensors opens each of
them. It is written here and not by the library because the library wants whole tensors in memory, while a data file
is written bit by bit from the tensors' own memory: the header comes first, and it is known before any byte is.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets"}, ...}, padded with spaces
    data      the entries' bytes, one after the other; offsets count from here
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeGuard

import numpy as np
import numpy.typing as npt

from hpdcp._base.errors import CorruptCheckpointError, InvalidArgumentError
from hpdcp._format.dtypes import DTYPE_BITS

Buffer = bytes | bytearray | memoryview

PREFIX_BYTES: Final = 8
"""Bytes before the JSON: its length."""

MAX_HEADER_BYTES: Final = 64 << 20
"""Longest header that is written. safetensors refuses to read one over 100 MB; a file is split before that."""

MAX_READABLE_HEADER_BYTES: Final = 100_000_000
"""Longest header that is read: safetensors' own limit."""

METADATA_KEY: Final = "__metadata__"
"""The one name in a header that is not an entry."""

_NUMPY_DTYPES: Final[Mapping[str, np.dtype[np.generic]]] = MappingProxyType(
    {
        name: np.dtype(code)
        for name, code in {
            "BOOL": "?",
            "U8": "<u1",
            "I8": "<i1",
            "U16": "<u2",
            "I16": "<i2",
            "F16": "<f2",
            "U32": "<u4",
            "I32": "<i4",
            "F32": "<f4",
            "U64": "<u8",
            "I64": "<i8",
            "F64": "<f8",
            "C64": "<c8",
        }.items()
    }
)
_NAMES_OF_NUMPY: Final[Mapping[np.dtype[np.generic], str]] = MappingProxyType(
    {dtype: name for name, dtype in _NUMPY_DTYPES.items()}
)
_LITTLE: Final = sys.byteorder == "little"
_ONLY_INT: Final = frozenset({int})
_LARGEST_DIM: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One entry to be written."""

    key: str
    dtype_name: str
    """A name in `dtypes.DTYPE_BITS`."""
    shape: tuple[int, ...]
    nbytes: int
    """What dtype and shape make; given so that a mistake is found before a file is written."""


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """Many entries to be written: the fields of `TensorEntry`, each as a column."""

    keys: Sequence[str]
    dtype_names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    nbytes: Sequence[int]

    @classmethod
    def of(cls, entries: Sequence[TensorEntry]) -> EntryColumns:
        return cls(
            [entry.key for entry in entries],
            [entry.dtype_name for entry in entries],
            [entry.shape for entry in entries],
            [entry.nbytes for entry in entries],
        )


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One entry of a header that was read."""

    key: str
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    """Byte of the file where its data starts."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParsedHeader:
    """What a header says, checked against the size of its file."""

    metadata: Mapping[str, str]
    entries: tuple[StoredEntry, ...]
    """In the order of their data."""
    data_start: int
    """Byte of the file where the first entry's data starts; the header ends there."""


def entry_nbytes(dtype_name: str, shape: Sequence[int]) -> int:
    """Bytes that `shape` elements of `dtype_name` take.

    Raises InvalidArgumentError for a dtype safetensors cannot name, and for sub-byte elements that end within a byte.

    >>> entry_nbytes("BF16", (3, 4)), entry_nbytes("F4", (2, 3)), entry_nbytes("F32", ())
    (24, 3, 4)
    """
    bits = DTYPE_BITS.get(dtype_name)
    if bits is None:
        raise InvalidArgumentError(
            f"safetensors has no dtype {dtype_name!r}; it has {', '.join(DTYPE_BITS)}. Store the bytes as U8."
        )
    for dim in shape:
        bits *= dim
    if bits % 8:
        raise InvalidArgumentError(
            f"shape {tuple(shape)} of {dtype_name} ends within a byte, which safetensors cannot hold: "
            "store the bytes as U8."
        )
    return bits // 8


def build_header(
    entries: Sequence[TensorEntry] | EntryColumns, metadata: Mapping[str, str], *, align: int = 4096
) -> tuple[bytes, list[int]]:
    """The first bytes of a file that holds `entries` in this order, and the byte of it where each one's data starts.

    The header (length field included) is padded with spaces to a multiple of `align`, so that data starts there.
    Entries follow one another without holes, as the format demands: give them in an order that keeps each one aligned.

    Raises InvalidArgumentError for a repeated, reserved or unencodable key, an unknown dtype, an `nbytes` that dtype
    and shape do not make, and a header over `MAX_HEADER_BYTES` (the caller splits the file).
    """
    if align < 1 or align % 8:
        raise InvalidArgumentError(f"align is {align}; expected a positive multiple of 8.")
    columns = entries if isinstance(entries, EntryColumns) else EntryColumns.of(entries)
    _check_keys(columns.keys)
    ends = list(itertools.accumulate(columns.nbytes, initial=0))
    written: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    parts = [f'"{METADATA_KEY}":{_TEXT.encode(dict(metadata))}']
    rows = zip(columns.keys, columns.dtype_names, columns.shapes, columns.nbytes, ends[:-1], ends[1:], strict=True)
    for key, name, shape, nbytes, start, end in rows:
        expected, what = written.get((name, shape)) or (-1, "")
        if expected < 0:
            expected = entry_nbytes(name, shape)
            what = f'"dtype":"{name}","shape":{_TEXT.encode(list(shape))}'
            written[name, shape] = expected, what
        if nbytes != expected:
            raise InvalidArgumentError(
                f"key {key!r}: {name} of shape {shape} is {expected} bytes, but {nbytes} were announced."
            )
        parts.append(f'{_TEXT.encode(key)}:{{{what},"data_offsets":[{start},{end}]}}')
    try:
        text = f"{{{','.join(parts)}}}".encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"a header cannot hold the lone surrogate in {error.object[max(0, error.start - 20) : error.end + 20]!r}: "
            "escape the key or the value first."
        ) from None
    data_start = -(-(PREFIX_BYTES + len(text)) // align) * align
    padded = data_start - PREFIX_BYTES
    if padded > MAX_HEADER_BYTES:
        raise InvalidArgumentError(
            f"the header of {len(columns.keys)} entries takes {padded} bytes, over the limit of {MAX_HEADER_BYTES}: "
            "split the entries over several files."
        )
    header = padded.to_bytes(PREFIX_BYTES, "little") + text.ljust(padded, b" ")
    return header, [data_start + start for start in ends[:-1]]


_TEXT: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _check_keys(keys: Sequence[str]) -> None:
    different = set(keys)
    if len(different) == len(keys) and METADATA_KEY not in different:
        return
    for number, key in enumerate(keys):
        if key == METADATA_KEY or key in keys[:number]:
            why = "is the format's own name" if key == METADATA_KEY else "is given twice"
            raise InvalidArgumentError(f"key {key!r} {why}: keys in one file differ and are not reserved.")


def header_length(head: Buffer, file_size: int, *, where: str) -> int:
    """Bytes from the start of the file to the start of its data; `head` holds at least its first 8 bytes.

    A reader fetches the first bytes of the file, asks this how much it needs, and fetches the rest if there is more.
    Raises CorruptCheckpointError, naming `where`, when the file cannot hold such a header.
    """
    if file_size < PREFIX_BYTES or len(head) < PREFIX_BYTES:
        raise CorruptCheckpointError(
            f"{where} is {file_size} bytes long; a safetensors file has at least {PREFIX_BYTES}. It was cut off, "
            "or it is something else."
        )
    length = int.from_bytes(head[:PREFIX_BYTES], "little")
    if length > MAX_READABLE_HEADER_BYTES:
        raise CorruptCheckpointError(
            f"{where} announces a header of {length} bytes, over the format's limit of {MAX_READABLE_HEADER_BYTES}: "
            "it is damaged, or it is not a safetensors file."
        )
    if PREFIX_BYTES + length > file_size:
        raise CorruptCheckpointError(
            f"{where} announces a header of {length} bytes but is only {file_size} bytes long: it was cut off, "
            "or it is not a safetensors file."
        )
    return PREFIX_BYTES + length


def parse_header(head: Buffer, file_size: int, *, where: str) -> ParsedHeader:
    """What the header in `head`, the first bytes of a file of `file_size` bytes, says.

    `head` must hold the whole header (`header_length` bytes; more is fine), else InvalidArgumentError. Whatever is
    wrong with the header itself, or does not fit the file, is a CorruptCheckpointError naming `where`: entries are
    known to lie within the file, one after the other, each as long as its dtype and shape say.
    """
    data_start = header_length(head, file_size, where=where)
    if len(head) < data_start:
        raise InvalidArgumentError(f"{where}: parse_header needs {data_start} bytes of the file and got {len(head)}.")
    table = _parse_json(bytes(head[PREFIX_BYTES:data_start]), where)
    metadata = table.pop(METADATA_KEY, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptCheckpointError(f"{where}: {METADATA_KEY} in its header is not a table of strings.")
    data_size = file_size - data_start
    entries = [_parse_entry(key, value, data_start, data_size, where) for key, value in table.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end = data_start
    for entry in entries:
        if entry.offset != end:
            kind = "overlaps the entry before it" if entry.offset < end else "leaves a hole before it"
            raise CorruptCheckpointError(
                f"{where}: entry {entry.key!r} starts at byte {entry.offset} and {kind} (expected {end})."
            )
        end += entry.nbytes
    if end != file_size:
        raise CorruptCheckpointError(
            f"{where} is {file_size} bytes long, but its header describes {end}: bytes were added, or "
            "the header is damaged."
        )
    return ParsedHeader(MappingProxyType(metadata), tuple(entries), data_start)


def pack_columns(columns: Mapping[str, npt.NDArray[np.generic]], metadata: Mapping[str, str]) -> bytes:
    """A whole file that holds `columns`, little-endian, and `metadata`.

    Widest dtypes come first, so that `unpack_columns` hands out aligned views. Raises InvalidArgumentError for a dtype
    that numpy and safetensors do not share, and as `build_header` does.
    """
    arrays: list[tuple[str, str, npt.NDArray[np.generic]]] = []
    for key, column in columns.items():
        dtype = column.dtype if column.dtype.isnative and _LITTLE else column.dtype.newbyteorder("<")
        name = _NAMES_OF_NUMPY.get(dtype)
        if name is None:
            raise InvalidArgumentError(
                f"column {key!r} has dtype {column.dtype}; expected one of "
                f"{', '.join(str(known) for known in _NAMES_OF_NUMPY)}."
            )
        # np.ascontiguousarray would turn a 0-dim column into one of shape (1,).
        arrays.append((key, name, np.asarray(column, dtype=dtype, order="C")))
    arrays.sort(key=lambda item: -item[2].itemsize)
    header, _ = build_header(
        [TensorEntry(key, name, array.shape, array.nbytes) for key, name, array in arrays], metadata, align=64
    )
    return b"".join([header, *(array.data for _, _, array in arrays)])


def unpack_columns(buffer: Buffer, *, where: str) -> tuple[dict[str, npt.NDArray[np.generic]], Mapping[str, str]]:
    """The columns and the metadata of a whole file, as read-only views of `buffer`, which must not change meanwhile.

    Raises CorruptCheckpointError, naming `where`, as `parse_header` does and for a dtype numpy does not have.
    """
    head = parse_header(buffer, len(buffer), where=where)
    columns: dict[str, npt.NDArray[np.generic]] = {}
    for entry in head.entries:
        dtype = _NUMPY_DTYPES.get(entry.dtype_name)
        if dtype is None:
            raise CorruptCheckpointError(
                f"{where}: column {entry.key!r} has dtype {entry.dtype_name}, which no column has."
            )
        count = entry.nbytes // dtype.itemsize
        # frombuffer refuses an offset at the very end, where an empty column lies.
        view = np.frombuffer(buffer, dtype, count, entry.offset) if count else np.empty(0, dtype)
        if entry.shape != (count,):
            try:
                view = view.reshape(entry.shape)
            except ValueError:
                raise CorruptCheckpointError(
                    f"{where}: column {entry.key!r} has the impossible shape {entry.shape}."
                ) from None
        view.flags.writeable = False
        columns[entry.key] = view
    return columns, head.metadata


def _parse_json(text: bytes, where: str) -> dict[str, object]:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name is given twice")
        return table

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{where}: its header is not the JSON of a safetensors file ({error}): it is damaged, or it is "
            "something else."
        ) from None
    if not isinstance(parsed, dict):
        raise CorruptCheckpointError(f"{where}: its header is JSON, but not a table of entries.")
    return parsed


def _parse_entry(key: str, value: object, data_start: int, data_size: int, where: str) -> StoredEntry:
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{where}: entry {key!r} in its header is not a table.")
    dtype_name, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype_name, str) or dtype_name not in DTYPE_BITS:
        raise CorruptCheckpointError(
            f"{where}: entry {key!r} has dtype {dtype_name!r}, which safetensors does not have."
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CorruptCheckpointError(
            f"{where}: entry {key!r} has shape {shape!r} and data_offsets {offsets!r}; expected lists of sizes."
        )
    start, stop = offsets
    if start > stop or stop > data_size:
        raise CorruptCheckpointError(
            f"{where}: entry {key!r} has bytes {start} to {stop} of the data, which is {data_size} bytes long: "
            "the file was cut off, or its header is damaged."
        )
    if _bits(dtype_name, shape, limit=data_size * 8) != (stop - start) * 8:
        raise CorruptCheckpointError(
            f"{where}: entry {key!r} holds {stop - start} bytes, which {dtype_name} of shape {shape} does not make."
        )
    return StoredEntry(key, dtype_name, tuple(shape), data_start + start, stop - start)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    # type() and not isinstance(): JSON's true is an int to Python.
    if type(value) is not list or not _ONLY_INT.issuperset(map(type, value)):
        return False
    return not value or (min(value) >= 0 and max(value) <= _LARGEST_DIM)


def _bits(dtype_name: str, shape: Sequence[int], *, limit: int) -> int:
    """Bits that the elements take; some number above `limit` when they take more (a hostile shape stays cheap)."""
    if 0 in shape:
        return 0
    bits = DTYPE_BITS[dtype_name]
    for dim in shape:
        bits *= dim
        if bits > limit:
            break
    return bits
