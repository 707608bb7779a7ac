"""Headers that are damaged, cut off or made by somebody who means harm."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._format.container import TensorEntry, build_header, header_length, parse_header, unpack_columns


def file_with(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DATA = b"abcd"

BAD_FILES = {
    "nothing at all": b"",
    "seven bytes": b"1234567",
    "a length over the limit": (200_000_000).to_bytes(8, "little") + b"{}",
    "a length beyond the end": (100).to_bytes(8, "little") + b"{}",
    "the largest length": b"\xff" * 8,
    "no JSON": file_with(b"hello"),
    "JSON cut off": file_with(b'{"a": {"dtype"'),
    "not UTF-8": file_with(b'{"\xff": 1}'),
    "a list": file_with([]),
    "deep nesting": file_with(b"[" * 100_000),
    "a number of many digits": file_with(b'{"a":' + b"9" * 10_000 + b"}"),
    "an entry given twice": file_with(
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        DATA,
    ),
    "metadata that is a list": file_with({"__metadata__": [], "a": entry()}, DATA),
    "metadata with a number": file_with({"__metadata__": {"a": 1}, "a": entry()}, DATA),
    "an entry that is a list": file_with({"a": []}),
    "an unknown dtype": file_with({"a": entry("U7")}, DATA),
    "a dtype that is a list": file_with({"a": entry(["U8"])}, DATA),
    "a negative size": file_with({"a": entry(shape=[-4])}, DATA),
    "a fraction for a size": file_with({"a": entry(shape=[4.0])}, DATA),
    "a truth value for a size": file_with({"a": entry(shape=[4, True])}, DATA),
    "a size over 63 bits": file_with({"a": entry(shape=[0, 1 << 63], offsets=[0, 0])}),
    "no shape": file_with({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, DATA),
    "no offsets": file_with({"a": {"dtype": "U8", "shape": [4]}}, DATA),
    "three offsets": file_with({"a": entry(offsets=[0, 4, 4])}, DATA),
    "offsets back to front": file_with({"a": entry(offsets=[4, 0])}, DATA),
    "too few bytes for the shape": file_with({"a": entry(shape=[5])}, DATA),
    "too many bytes for the shape": file_with({"a": entry(shape=[3])}, DATA),
    "bytes beyond the end": file_with({"a": entry(shape=[8], offsets=[0, 8])}, DATA),
    "an overlap": file_with({"a": entry(shape=[3], offsets=[0, 3]), "b": entry(shape=[3], offsets=[1, 4])}, DATA),
    "a hole": file_with({"a": entry(shape=[1], offsets=[0, 1]), "b": entry(shape=[2], offsets=[2, 4])}, DATA),
    "a hole at the start": file_with({"a": entry(shape=[3], offsets=[1, 4])}, DATA),
    "bytes after the last entry": file_with({"a": entry(shape=[3], offsets=[0, 3])}, DATA),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_file_is_named(what: str) -> None:
    data = BAD_FILES[what]
    with pytest.raises(CorruptCheckpointError, match=r"^step_1/_rank0_"):
        parse_header(data, len(data), where="step_1/_rank0_.safetensors")


def test_a_shape_that_multiplies_to_a_monster_costs_nothing() -> None:
    data = file_with({"a": entry(shape=[1 << 62] * 100_000)}, DATA)
    started = time.process_time()
    with pytest.raises(CorruptCheckpointError, match="does not make"):
        parse_header(data, len(data), where="file")
    assert time.process_time() - started < 5


def test_a_file_cut_off_anywhere_is_found_out() -> None:
    header, _ = build_header([TensorEntry("a", "U8", (40,), 40)], {"x": "y"}, align=64)
    data = header + bytes(40)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match=r"^file"):
            parse_header(data[:length], length, where="file")


@given(st.binary(max_size=300), st.integers(0, 400))
@example(b"\0" * 8, 8)
def test_any_bytes_are_read_or_refused(data: bytes, claimed: int) -> None:
    for size, piece in ((len(data), data), (claimed, data[:claimed].ljust(claimed, b" "))):
        try:
            header_length(piece, size, where="file")
            parse_header(piece, size, where="file")
            unpack_columns(piece, where="file")
        except CorruptCheckpointError as error:
            assert str(error).startswith("file")  # noqa: PT017 - not raising is right as well


@given(st.integers(0, 1 << 32))
def test_a_flipped_byte_is_read_or_refused(seed: int) -> None:
    header, _ = build_header(
        [TensorEntry("a", "F32", (2, 5), 40), TensorEntry("b", "BOOL", (), 1)], {"x": "y"}, align=8
    )
    data = bytearray(header + bytes(41))
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 3)):
        data[draw.randrange(len(data))] = (
            draw.choice(b'"{}[]:,0129 \xff\0') if draw.random() < 0.7 else draw.randrange(256)
        )
    try:
        parsed = parse_header(data, len(data), where="file")
    except CorruptCheckpointError as error:
        assert str(error).startswith("file")  # noqa: PT017 - not raising is right as well
    else:
        assert sum(found.nbytes for found in parsed.entries) == len(data) - parsed.data_start
