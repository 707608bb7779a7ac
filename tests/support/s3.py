"""The S3 server of a test session, as the fixture `s3_server`: started when the first test asks for it, ended with the
session. Ranks and other processes that a test starts with `S3Server.environment()` use the same one."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.services import s3
from tests.support.proxy import Proxy, proxied


@dataclass(frozen=True)
class S3Server:
    """A real S3 server, and one bucket of it."""

    url: str
    access_key: str = s3.ACCESS_KEY
    secret_key: str = field(default=s3.SECRET_KEY, repr=False)
    region: str = s3.REGION
    bucket: str = s3.BUCKET
    https_url: str | None = None
    """The same objects over TLS; None where the program openssl is missing."""
    ca: str | None = None
    """File with the certificate that `https_url` is trusted by."""

    @classmethod
    def at(cls, address: s3.Address) -> S3Server:
        return cls(address.url, https_url=address.https_url, ca=address.ca)

    def new_prefix(self) -> str:
        """A URL that nothing was ever stored under: the server's listings remember what was deleted."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"

    def through(self, proxy: Proxy) -> S3Server:
        """The same server, by way of a proxy."""
        return S3Server(proxy.url, self.access_key, self.secret_key, self.region, self.bucket)

    def environment(self) -> dict[str, str]:
        """Variables by which other processes find the server: their SDKs, and the fixture in tests they run."""
        return s3.settings(s3.Address(self.url, self.https_url, self.ca))

    def storage_options(self, **changes: object) -> dict[str, Any]:
        """The server as fsspec's options for S3, independent of the environment."""
        options: dict[str, Any] = {
            "key": self.access_key,
            "secret": self.secret_key,
            "client_kwargs": {"endpoint_url": self.url, "region_name": self.region},
        }
        return options | changes

    def client(self) -> Any:
        """A plain S3 client (botocore's), to look at the bucket without hpdcp; close it."""
        from botocore.config import Config

        return _session().create_client(
            "s3",
            endpoint_url=self.url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}, proxies={}),
        )

    def objects(self, prefix: str) -> dict[str, int]:
        """Key → size of all objects under a URL that `new_prefix` gave; keys are relative to it."""
        folder = self._folder(prefix)
        with contextlib.closing(self.client()) as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=folder)
            entries = [entry for page in pages for entry in page.get("Contents", ())]
        return {entry["Key"].removeprefix(folder): entry["Size"] for entry in entries}

    def open_uploads(self, prefix: str) -> list[str]:
        """Keys, relative to the URL, of multipart uploads that were begun and neither completed nor aborted."""
        folder = self._folder(prefix)
        with contextlib.closing(self.client()) as client:
            answer = client.list_multipart_uploads(Bucket=self.bucket, Prefix=folder)
            return sorted(upload["Key"].removeprefix(folder) for upload in answer.get("Uploads", ()))

    def _folder(self, prefix: str) -> str:
        return prefix.removeprefix(f"s3://{self.bucket}/").rstrip("/") + "/"


@functools.cache
def _session() -> Any:
    # It reads the description of S3, which takes longer than most requests.
    import botocore.session

    return botocore.session.Session()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The session's server: one that the environment announces, else one of its own."""
    address = s3.address_from_environment()
    if address is not None:
        yield S3Server.at(address)
        return
    assert "RANK" not in os.environ, "a rank uses the server of the test that started it: pass environment()"
    try:
        service = s3.S3Service(memory=_memory_is_plenty())
    except s3.ServiceError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        yield S3Server.at(service.address)
    finally:
        service.stop()


def _memory_is_plenty() -> bool:
    # The default /dev/shm of a container has 64 MB.
    return os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 << 30


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, named by this process's environment variables as a user's would be."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[Proxy]:
    """A proxy of the test's own in front of the server: it counts, and breaks what it is told to break."""
    with proxied(s3_server.url) as proxy:
        yield proxy
