"""Names of tensors as paths in a zarr hierarchy: each name one path, none that a store or zarr trips over."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpdcp._base.backend import checked_key
from hpdcp_backends._zarr.names import escape, node_path


def unescape(component: str) -> str:
    """The key that `escape` was given: that there is one shows that each component means one key."""
    if component == "%":
        return ""
    raw = re.sub(rb"%([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), component.encode())
    return raw.decode("utf-8", "surrogatepass")


@given(st.text(st.characters(codec=None), max_size=20), st.booleans())
@example("", False)
@example("%", True)
@example("%63", False)
@example("\ud800", False)
@example("é" * 90, False)
def test_escaping_gives_one_component_that_names_the_key_alone(key: str, root: bool) -> None:
    component = escape(key, root=root)
    assert checked_key(f"{component}/zarr.json")
    assert "/" not in component
    assert component not in ("", ".", "..", "c", "zarr.json")
    assert not component.startswith("__")
    assert not component.startswith("%rank")
    assert unescape(component) == key


@given(st.text(st.characters(codec=None), max_size=6), st.text(st.characters(codec=None), max_size=6))
def test_two_keys_have_two_components(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@pytest.mark.parametrize("key", ["layers.0.weight", "_orig_mod.w", "with space", "ünï", "a-b_c", 0, "zarr.json2", "cc"])
def test_ordinary_keys_stay_as_they_are(key: object) -> None:
    assert escape(key) == str(key)


@pytest.mark.parametrize("key", ["_rank0_.bytes", "0.metadata", ".metadata", ".attempt"])
def test_at_the_root_no_key_takes_the_name_of_a_file_of_hpdcp(key: str) -> None:
    assert escape(key, root=True) != key
    assert unescape(escape(key, root=True)) == key


def test_a_long_key_is_shortened_and_stays_unique() -> None:
    one, other = escape("x" * 300 + "1"), escape("x" * 300 + "2")
    assert one != other
    assert len(one.encode()) <= 200
    assert escape("é" * 300).encode()


def test_what_a_rank_keeps_lies_under_a_name_that_no_key_gets() -> None:
    assert node_path(["rng", "state"], 2) == "%rank2/rng/state"
    assert node_path(["%rank2", "rng"], None) == "%25rank2/rng"
