"""The contract, where one instance is on one client and the other on another."""

from __future__ import annotations

import pytest

from hpdcp._base.backend import Backend
from hpdcp._base.mounts import file_system_type, is_nfs
from hpdcp.testing import BackendContract
from hpdcp_backends.nfs import NfsBackend
from tests.nfs.conftest import Mounts


class TestNfsBackendOnTwoClients(BackendContract):
    @pytest.fixture
    def backend(self, mounts: Mounts) -> NfsBackend:
        backend = NfsBackend(str(mounts.a / "root"))
        backend.prepare()
        self.other_root = str(mounts.b / "root")
        return backend

    def reopen(self, backend: Backend) -> Backend:
        return NfsBackend(self.other_root)


def test_the_mounts_are_told_apart_from_local_folders(mounts: Mounts) -> None:
    assert file_system_type(str(mounts.a / "step_1")) in ("nfs", "nfs4")
    assert is_nfs(str(mounts.b / "step_1" / "not there"))
    assert not is_nfs(str(mounts.served))
