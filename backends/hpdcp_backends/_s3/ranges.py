"""Ranges of one object read by several requests at a time, all of one version."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Final

from hpdcp._base.backend import ByteRange, Fetch
from hpdcp._base.threads import Threads
from hpdcp_backends._s3.client import S3Client
from hpdcp_backends._s3.errors import RequestFailedError
from hpdcp_backends._s3.readers import Got, Reader, open_reader
from hpdcp_backends._s3.retry import Retries

_LOG: Final = logging.getLogger("hpdcp_backends.s3")


class ReplacedError(Exception):
    """The key was replaced between two requests of one call."""


class TruncatedError(Exception):
    """The key is shorter than a request."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class RangeFetcher:
    """Fetches ranges of one bucket's objects, from any number of threads.

    Args:
        client: The bucket.
        retries: When a request is sent again.
        engine: What reads: as `open_reader` takes it.
        in_flight: Requests at a time, by all calls together.
    """

    def __init__(self, client: S3Client, retries: Retries, *, engine: str, in_flight: int) -> None:
        self._client = client
        self._retries = retries
        self._engine = engine
        self._slots = threading.BoundedSemaphore(in_flight)
        self._lock = threading.Lock()
        self._reader: Reader | None = None

    def fetch_all(self, name: str, wanted: Sequence[Fetch], *, pool: Callable[[], Threads]) -> None:
        """Fill the buffers of all requests from one version of the object.

        `pool` gives the threads that make them, and is asked only where there are several.

        Raises:
            ReplacedError: another version took its place meanwhile; the buffers' contents are undefined.
            TruncatedError: it is shorter than a request.
            RequestFailedError: a request failed for good.
        """
        if not wanted:
            return
        reading = _Reading(name)
        reader = self._open_reader()
        if len(wanted) == 1:
            self._fetch(reader, reading, wanted[0])
            return
        threads = pool()
        running = [threads.submit(self._fetch, reader, reading, fetch) for fetch in wanted]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            # The caller's buffers are its own again on return, so that nothing may still be writing into them.
            reading.stop.set()
            for future in running:
                future.cancel()
            wait(running)

    def _fetch(self, reader: Reader, reading: _Reading, fetch: Fetch) -> None:
        into = fetch.target
        buffer = memoryview(bytearray(fetch.range.length)) if into is None else into
        with self._slots:
            self._retries.call(lambda: self._fetch_once(reader, reading, fetch.range, buffer), stop=reading.stop)
        if into is None:
            fetch.scatter(buffer)

    def _fetch_once(self, reader: Reader, reading: _Reading, range_: ByteRange, into: memoryview) -> None:
        try:
            got = reader.fetch(reading.name, range_, into, etag=reading.condition, stop=reading.stop)
        except RequestFailedError as failure:
            if failure.status == 412:
                raise ReplacedError from failure
            if failure.status == 416:
                raise TruncatedError(self._client.head(reading.name).size) from failure
            raise
        reading.agree(got)
        if range_.stop > got.size:
            raise TruncatedError(got.size)
        if got.filled != range_.length:
            raise RequestFailedError(
                "ShortBody", f"{got.filled} bytes came where {range_.length} were asked for", temporary=True
            )

    def close(self) -> None:
        """Let go of the reader; the next call opens another."""
        with self._lock:
            self._reader = None

    def _open_reader(self) -> Reader:
        with self._lock:
            if self._reader is None:
                self._reader = self._retries.call(lambda: open_reader(self._client, self._engine, _LOG.info))
            return self._reader


class _Reading:
    """One call that reads ranges of a key, all of one version."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stop = threading.Event()
        self._etag: str | None = None
        self._size: int | None = None
        self._lock = threading.Lock()

    @property
    def condition(self) -> str | None:
        """What further requests demand of the version; None before the first answer.

        A weak tag, as proxies give that compress, meets no condition at all; it is compared only.
        """
        with self._lock:
            return None if self._etag is None or self._etag.startswith("W/") else self._etag

    def agree(self, got: Got) -> None:
        """Raise ReplacedError unless `got` is of the same version as the answers before."""
        with self._lock:
            if self._size is None:
                self._size, self._etag = got.size, got.etag
            elif (self._size, self._etag) != (got.size, got.etag):
                raise ReplacedError
