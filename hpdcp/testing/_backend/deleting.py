"""Keys and leftovers that are removed."""

from __future__ import annotations

import pytest

from hpdcp._base.backend import Backend
from hpdcp._base.errors import KeyNotFoundError
from hpdcp.testing._backend.base import BackendFixtures, put


class DeletingContract(BackendFixtures):
    """What goes, and what stays."""

    def test_deleting_removes_these_keys_and_no_others(self, backend: Backend, other: Backend) -> None:
        for key in ("one", "two", "twofold", "folder/two"):
            put(backend, key, key.encode())
        backend.delete(key for key in ("two", "folder/two", "never-there", "no/such/folder"))
        assert [info.key for info in other.list_keys(recursive=True)] == ["one", "twofold"]
        with pytest.raises(KeyNotFoundError):
            backend.read("two")
        backend.delete([])
        backend.delete(["two"])

    def test_clearing_away_leftovers_takes_no_key(self, backend: Backend, other: Backend) -> None:
        put(backend, "key", b"bytes")
        put(backend, "_rank0_.dead.safetensors", b"whole")
        other.remove_leftovers(silent_for=0, belongs=lambda key: True)
        assert [info.key for info in backend.list_keys()] == ["_rank0_.dead.safetensors", "key"]
