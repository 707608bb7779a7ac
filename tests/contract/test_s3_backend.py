"""The contract on a real S3 server, for both engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpdcp._base.backend import Backend
from hpdcp.testing import BackendContract
from hpdcp_backends.s3 import S3Backend
from tests.support.s3 import S3Server

MIB = 1 << 20


@pytest.mark.parametrize("engine", ["obstore", "botocore"], scope="class")
class TestS3Backend(BackendContract):
    @pytest.fixture
    def backend(self, s3_server: S3Server, engine: str) -> Iterator[Backend]:
        self.server, self.engine = s3_server, engine
        with open_backend(s3_server, s3_server.new_prefix(), engine) as backend:
            backend.prepare()
            yield backend

    def reopen(self, backend: Backend) -> Backend:
        return open_backend(self.server, backend.url, self.engine)


def open_backend(server: S3Server, url: str, engine: str) -> S3Backend:
    """With parts small enough for a test's objects to have several."""
    return S3Backend(
        url,
        storage_options=server.storage_options(),
        engine=engine,
        part_bytes=5 * MIB,
        put_below=8 * MIB,
        write_in_flight=3,
        max_read_bytes=4 * MIB,
        conditional_publish=True,
    )
