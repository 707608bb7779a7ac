"""Columns of numbers and strings, packed into one safetensors file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from safetensors.numpy import load_file

from hpdcp._base.errors import CorruptCheckpointError, InvalidArgumentError
from hpdcp._format.container import TensorEntry, build_header, pack_columns, unpack_columns
from hpdcp._format.strings import StringColumn

DTYPES = ["?", "u1", "i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8", "<c8"]
any_text = st.text(st.characters(), max_size=8)


@given(
    st.dictionaries(
        st.text("abc.é", max_size=6),
        st.sampled_from(DTYPES).flatmap(
            lambda code: nps.arrays(code, nps.array_shapes(min_dims=0, min_side=0, max_dims=3))
        ),
        max_size=6,
    )
)
def test_columns_come_back_as_aligned_read_only_views(columns: dict[str, npt.NDArray[np.generic]]) -> None:
    data = pack_columns(columns, {"version": "1"})
    found, metadata = unpack_columns(data, where="file")
    assert dict(metadata) == {"version": "1"}
    assert set(found) == set(columns)
    memory = np.frombuffer(data, np.uint8)
    for key, column in columns.items():
        assert found[key].dtype == column.dtype
        assert found[key].shape == column.shape
        assert found[key].tobytes() == column.tobytes()
        assert not found[key].flags.writeable
        assert found[key].size == 0 or np.shares_memory(found[key], memory)
        assert (found[key].ctypes.data - memory.ctypes.data) % found[key].itemsize == 0 or found[key].size == 0


def test_the_library_reads_columns(tmp_path: Path) -> None:
    columns: dict[str, npt.NDArray[np.generic]]
    columns = {"ends": np.arange(5), "blob": np.frombuffer(b"text", np.uint8), "none": np.zeros((0, 3), np.int32)}
    (tmp_path / "file").write_bytes(pack_columns(columns, {}))
    found = load_file(tmp_path / "file")
    assert {key: column.tolist() for key, column in found.items()} == {
        key: column.tolist() for key, column in columns.items()
    }


def test_columns_in_another_byte_order_or_layout_are_stored_as_any_other() -> None:
    table = np.arange(12, dtype=">i4").reshape(3, 4)
    found, _ = unpack_columns(
        pack_columns({"swapped": table, "column": table[:, 1], "turned": table.T}, {}), where="file"
    )
    assert found["swapped"].tolist() == table.tolist()
    assert found["column"].tolist() == [1, 5, 9]
    assert found["turned"].tolist() == table.T.tolist()


def test_a_dtype_no_column_has_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'names' has dtype <U3"):
        pack_columns({"names": np.array(["abc"])}, {})
    header, _ = build_header([TensorEntry("half", "BF16", (1,), 2)], {})
    with pytest.raises(CorruptCheckpointError, match="file: column 'half' has dtype BF16"):
        unpack_columns(header + b"\0\0", where="file")


@given(st.lists(any_text, max_size=20))
def test_strings_come_back_as_they_were(strings: list[str]) -> None:
    made = StringColumn.from_strings(strings)
    found, _ = unpack_columns(pack_columns({"blob": made.blob, "ends": made.ends}, {}), where="file")
    column = StringColumn(found["blob"].view(np.uint8), found["ends"].view(np.int64), "file")
    assert list(column) == strings
    assert [column[row] for row in range(len(column))] == strings
    assert [column[row - len(column)] for row in range(len(column))] == strings
    for row in (len(column), -len(column) - 1):
        with pytest.raises(IndexError):
            column[row]


@given(st.lists(any_text, max_size=20), any_text)
def test_a_string_is_found_where_it_stands(strings: list[str], other: str) -> None:
    strings.sort()
    column = StringColumn.from_strings(strings)
    for text in [*strings, other]:
        assert column.find(text) == (strings.index(text) if text in strings else None)


@pytest.mark.parametrize(
    ("blob", "ends"),
    [
        (b"abc", [1, 2]),
        (b"abc", [1, 4]),
        (b"abc", [-1, 3]),
        (b"abc", [2, 1, 3]),
        (b"abc", []),
        (b"", [1]),
    ],
)
def test_ends_that_do_not_fit_their_text_are_damage(blob: bytes, ends: list[int]) -> None:
    with pytest.raises(CorruptCheckpointError, match="fqns of step_1"):
        StringColumn(np.frombuffer(blob, np.uint8), np.array(ends, np.int64), "fqns of step_1")


def test_text_that_is_not_utf8_is_damage_when_it_is_read() -> None:
    column = StringColumn(np.frombuffer(b"good\xffbad", np.uint8), np.array([4, 8]), "fqns of step_1")
    assert column[0] == "good"
    with pytest.raises(CorruptCheckpointError, match="fqns of step_1"):
        column[1]
    with pytest.raises(CorruptCheckpointError, match="fqns of step_1"):
        list(column)


def test_columns_of_another_kind_are_no_strings() -> None:
    with pytest.raises(CorruptCheckpointError, match="int32"):
        StringColumn(np.zeros(3, np.uint8), np.array([3], np.int32))
