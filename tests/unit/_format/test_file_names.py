from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpdcp._format import checksums, file_names
from hpdcp._format.file_names import (
    LEASE,
    METADATA,
    DataFileName,
    begins_as_data,
    carries_attempt,
    is_attempt,
    is_data_key,
    is_metadata_key,
    mailbox_folder,
)

ATTEMPT = "00c0ffee00c0ffee"
attempts = st.text("0123456789abcdef", min_size=16, max_size=16)


@given(
    st.integers(0, 10**6),
    st.sampled_from([".bytes", ".safetensors"]),
    st.none() | attempts,
    st.integers(0, 999_999_999),
)
def test_a_data_files_name_says_what_it_was_made_of(rank: int, suffix: str, attempt: str | None, part: int) -> None:
    name = DataFileName(rank, suffix, attempt, part)
    assert DataFileName.parse(name.key) == name
    assert is_data_key(name.key) and begins_as_data(name.key)


def test_an_attempt_of_digits_alone_is_no_number_of_a_file() -> None:
    found = DataFileName.parse("_rank0_.1234567890123456.bytes")
    assert found is not None and (found.attempt, found.part) == ("1234567890123456", 0)


@pytest.mark.parametrize(
    "key",
    ["", "weights.safetensors", "_rank0.bytes", "_rankx_.bytes", f"_rank0_.{ATTEMPT}", "_rank0_/a.bytes", METADATA],
)
def test_other_names_are_no_data_files(key: str) -> None:
    assert DataFileName.parse(key) is None or key == f"_rank0_.{ATTEMPT}"
    assert not carries_attempt(key, {ATTEMPT})


def test_a_name_carries_its_own_attempt_only() -> None:
    assert carries_attempt(f"_rank0_.1.{ATTEMPT}.bytes", [ATTEMPT])
    assert not carries_attempt(f"_rank0_.{ATTEMPT}.bytes", ["f" * 16])
    assert not carries_attempt("_rank0_.bytes", [ATTEMPT])


def test_metadata_is_told_from_other_files() -> None:
    assert [key for key in (METADATA, "0.metadata", "x.metadata", LEASE, "-1.metadata") if is_metadata_key(key)] == [
        METADATA,
        "0.metadata",
    ]
    assert is_attempt(ATTEMPT) and not is_attempt("rm-" + ATTEMPT)
    assert mailbox_folder(ATTEMPT) == f".mailbox-{ATTEMPT}"


@pytest.mark.parametrize("module", [file_names, checksums])
def test_the_examples_in_its_documentation_hold(module: object) -> None:
    outcome = doctest.testmod(module)  # type: ignore[arg-type]
    assert outcome.attempted and not outcome.failed
