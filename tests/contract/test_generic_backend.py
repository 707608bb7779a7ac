"""The backend over fsspec keeps the contract on file systems of every kind."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from hpdcp._base.backend import Backend
from hpdcp.testing import BackendContract
from hpdcp_backends.generic import GenericBackend
from tests.support.s3 import S3Server


class TestOnMemory(BackendContract):
    @pytest.fixture
    def backend(self) -> GenericBackend:
        backend = GenericBackend(f"memory://{uuid.uuid4().hex}/root")
        backend.prepare()
        return backend

    def reopen(self, backend: Backend) -> Backend:
        return GenericBackend(backend.url)


class TestOnFiles(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> GenericBackend:
        backend = GenericBackend(f"file://{tmp_path}/root")
        backend.prepare()
        return backend

    def reopen(self, backend: Backend) -> Backend:
        return GenericBackend(backend.url)


class TestOnS3(BackendContract):
    @pytest.fixture
    def backend(self, s3_server: S3Server) -> GenericBackend:
        self.options = s3_server.storage_options()
        backend = GenericBackend(s3_server.new_prefix(), storage_options=self.options, part_bytes=5 << 20)
        backend.prepare()
        return backend

    def reopen(self, backend: Backend) -> Backend:
        return GenericBackend(backend.url, storage_options=self.options, part_bytes=5 << 20)
