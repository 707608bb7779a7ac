"""An endpoint of S3 without http:// is told by where it was given."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpdcp._base.errors import InvalidArgumentError, StorageError
from hpdcp._files import registry

pytest.importorskip("botocore")


@pytest.fixture(autouse=True)
def no_settings_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def refused(**storage_options: Any) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        registry.open_backend("s3://bucket/run", storage_options={"anon": True, **storage_options}).list_keys()
    return str(caught.value)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_variable_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "127.0.0.1:9")
    assert refused() == (
        f"environment variable {variable} is '127.0.0.1:9': http:// or https:// is missing in front of it."
    )


def test_the_option_is_named_and_goes_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    message = refused(endpoint_url="me:hidden@localhost:9000")
    assert message.startswith("storage_options endpoint_url is '***@localhost:9000': http:// or https:// is missing")


def test_the_file_of_aws_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = localhost:9000\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert refused().startswith("endpoint_url in the configuration of AWS is 'localhost:9000': http:// or")


class Listener:
    """Something that accepts connections at a port of its own, and says `answer` to what comes first."""

    def __init__(self, answer: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self._open: list[socket.socket] = []
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._open.append(connection)
                if self._answer:
                    connection.recv(1 << 16)
                    connection.sendall(self._answer)
                    connection.close()

    def close(self) -> None:
        for each in (self._socket, *self._open):
            each.close()


@pytest.mark.parametrize(
    ("scheme", "answer", "said"),
    [
        ("http", b"", "takes connections and does not answer"),
        ("https", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "check https:// against http://"),
    ],
)
def test_an_endpoint_that_is_none_is_told_within_seconds(scheme: str, answer: bytes, said: str) -> None:
    listener = Listener(answer)
    try:
        began = time.monotonic()
        with pytest.raises(StorageError, match=said):
            registry.open_backend(
                "s3://bucket/run",
                storage_options={
                    "key": "k",
                    "secret": "s",
                    "endpoint_url": f"{scheme}://127.0.0.1:{listener.port}",
                    "config_kwargs": {"read_timeout": 2},
                },
            ).list_keys()
        assert time.monotonic() - began < 15
    finally:
        listener.close()
