"""The local backend: the contract, and what only a local folder has."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpdcp.backend import Backend
from hpdcp.testing import BackendContract
from hpdcp_backends.local import LocalBackend


class TestLocalBackend(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        backend = LocalBackend(str(tmp_path / "root"))
        backend.prepare()
        return backend

    def reopen(self, backend: Backend) -> Backend:
        return LocalBackend(backend.url)
