"""Headers of safetensors files: written by us and read by the library, and the other way round."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from safetensors.numpy import save

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._format import container
from hpdcp._format.container import (
    StoredEntry,
    TensorEntry,
    build_header,
    entry_nbytes,
    header_length,
    parse_header,
)
from hpdcp._format.dtypes import DTYPE_BITS

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def entries(draw: st.DrawFn) -> list[TensorEntry]:
    keys = draw(st.lists(texts.filter(lambda key: key != "__metadata__"), max_size=6, unique=True))
    found = []
    for key in keys:
        name, shape = draw(st.sampled_from(sorted(DTYPE_BITS))), draw(shapes)
        if DTYPE_BITS[name] * math.prod(shape) % 8:
            shape = (*shape, 8)
        found.append(TensorEntry(key, name, shape, entry_nbytes(name, shape)))
    return found


def whole_file(found: list[TensorEntry], metadata: dict[str, str], align: int = 4096) -> tuple[bytes, list[int]]:
    """A file whose data is the bytes 0, 1, 2, ..."""
    header, offsets = build_header(found, metadata, align=align)
    total = sum(entry.nbytes for entry in found)
    return header + bytes(number % 256 for number in range(total)), offsets


@given(entries(), st.dictionaries(texts, texts, max_size=3), st.sampled_from([8, 64, 4096]))
def test_the_library_reads_what_we_write(found: list[TensorEntry], metadata: dict[str, str], align: int) -> None:
    data, offsets = whole_file(found, metadata, align)
    read = dict(deserialize(data))
    assert set(read) == {entry.key for entry in found}
    for entry, offset in zip(found, offsets, strict=True):
        assert read[entry.key]["dtype"] == entry.dtype_name
        assert read[entry.key]["shape"] == list(entry.shape)
        assert bytes(read[entry.key]["data"]) == data[offset : offset + entry.nbytes]


@given(entries(), st.dictionaries(texts, texts, max_size=3))
def test_we_read_what_we_write(found: list[TensorEntry], metadata: dict[str, str]) -> None:
    data, offsets = whole_file(found, metadata)
    parsed = parse_header(data, len(data), where="file")
    assert dict(parsed.metadata) == metadata
    assert sorted(parsed.entries, key=lambda entry: entry.key) == sorted(
        (
            StoredEntry(entry.key, entry.dtype_name, entry.shape, offset, entry.nbytes)
            for entry, offset in zip(found, offsets, strict=True)
        ),
        key=lambda entry: entry.key,
    )


@given(
    st.dictionaries(
        texts.filter(lambda key: key != "__metadata__"),
        st.tuples(st.sampled_from(["f8", "i4", "u2", "i1", "?", "f2", "c8"]), shapes),
        max_size=5,
    ),
    st.dictionaries(texts, texts, max_size=3),
)
def test_we_read_what_the_library_writes(
    wanted: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    arrays = {key: np.arange(math.prod(shape)).astype(code).reshape(shape) for key, (code, shape) in wanted.items()}
    # Given an empty table, and no arrays, safetensors 0.8 writes a header that it cannot read itself.
    data = save(arrays, metadata or None)
    parsed = parse_header(data, len(data), where="file")
    assert dict(parsed.metadata) == metadata
    assert {entry.key for entry in parsed.entries} == set(arrays)
    for entry in parsed.entries:
        assert entry.shape == arrays[entry.key].shape
        assert data[entry.offset : entry.offset + entry.nbytes] == arrays[entry.key].tobytes()


def test_every_dtype_of_the_library_is_known_with_its_size(tmp_path: Path) -> None:
    found = [TensorEntry(name, name, (8,), bits) for name, bits in DTYPE_BITS.items()]
    data, _ = whole_file(found, {})
    assert {key: (entry["dtype"], len(entry["data"])) for key, entry in deserialize(data)} == {
        name: (name, bits) for name, bits in DTYPE_BITS.items()
    }
    # The library lists the names it has when it meets one it has not.
    unknown = build_header([TensorEntry("x", "U8", (1,), 1)], {})[0].replace(b'"U8"', b'"Q8"') + b"\0"
    with pytest.raises(Exception, match="unknown variant") as caught:
        deserialize(unknown)
    listed = str(caught.value).split("expected one of")[1].split(" at line")[0]
    assert {name.strip(" `") for name in listed.split(",")} == set(DTYPE_BITS)


def test_data_starts_aligned_and_follows_without_holes() -> None:
    found = [TensorEntry(f"key {number}", "U8", (number,), number) for number in range(5)]
    header, offsets = build_header(found, {"a": "b"})
    assert len(header) == 4096
    assert offsets == [4096, 4096, 4097, 4099, 4102]
    assert int.from_bytes(header[:8], "little") == 4088
    long, offsets = build_header(found, {"a": "b" * 5000})
    assert len(long) == offsets[0] == 8192


def test_metadata_comes_first_so_that_a_person_sees_it_first(tmp_path: Path) -> None:
    data, _ = whole_file([TensorEntry("w", "F32", (2,), 8)], {"format": "hpdcp"})
    assert data[8:].startswith(b'{"__metadata__":{"format":"hpdcp"}')
    (tmp_path / "file").write_bytes(data)
    with safe_open(tmp_path / "file", framework="np") as opened:
        assert opened.metadata() == {"format": "hpdcp"}
        assert opened.get_tensor("w").shape == (2,)


def test_a_reader_learns_from_eight_bytes_how_much_to_fetch() -> None:
    data, _ = whole_file([TensorEntry("w", "F32", (2,), 8)], {})
    assert header_length(data[:8], len(data), where="file") == 4096
    with pytest.raises(InvalidArgumentError, match="file: parse_header needs 4096 bytes"):
        parse_header(data[:100], len(data), where="file")
    assert parse_header(data[:4096], len(data), where="file") == parse_header(memoryview(data), len(data), where="file")


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([("a", "U8", (1,), 1), ("a", "U8", (1,), 1)], "'a' is given twice"),
        ([("__metadata__", "U8", (1,), 1)], "the format's own name"),
        ([("a", "F32", (3,), 8)], "is 12 bytes, but 8 were announced"),
        ([("a", "C128", (1,), 16)], "no dtype 'C128'"),
        ([("a", "F4", (3,), 2)], "ends within a byte"),
        ([("bad \ud800 key", "U8", (1,), 1)], "lone surrogate"),
    ],
)
def test_what_a_header_cannot_hold_is_refused(found: list[tuple[str, str, tuple[int, ...], int]], problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        build_header([TensorEntry(*fields) for fields in found], {})


def test_a_header_that_readers_would_refuse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", 10_000)
    found = [TensorEntry(f"{number}", "U8", (1,), 1) for number in range(1000)]
    build_header(found[:100], {})
    with pytest.raises(InvalidArgumentError, match="split the entries over several files"):
        build_header(found, {})


def test_ten_thousand_entries_survive_the_journey() -> None:
    found = [
        TensorEntry(f"model.layers.{number}.weight", "BF16", (number % 3,), number % 3 * 2) for number in range(10_000)
    ]
    header, offsets = build_header(found, {})
    parsed = parse_header(header, offsets[-1] + found[-1].nbytes, where="file")
    stored = {entry.key: entry.offset for entry in parsed.entries}
    assert [stored[entry.key] for entry in found] == offsets
    assert len(json.loads(header[8:])) == 10_001
