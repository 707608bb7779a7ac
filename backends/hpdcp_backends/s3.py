"""Buckets of S3 and of the servers that speak its protocol."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Final

from hpdcp._base.backend import (
    Backend,
    ByteRange,
    Fetch,
    KeyInfo,
    can_be_key,
    check_empty,
    checked_buffers,
    checked_key,
    fetches,
    truncated,
)
from hpdcp._base.errors import InvalidArgumentError, NotSupportedError, StorageError
from hpdcp._base.threads import Threads
from hpdcp_backends._s3.client import S3Client
from hpdcp_backends._s3.errors import Place, RequestFailedError
from hpdcp_backends._s3.options import S3Options
from hpdcp_backends._s3.readers import Got, Reader, open_reader
from hpdcp_backends._s3.retry import Retries
from hpdcp_backends._s3.upload import PartCutter, Upload, part_size

_LOG: Final = logging.getLogger(__name__)
_URL: Final = re.compile(r"(?i:s3a?)://([^/]+)/*(.*)", re.DOTALL)
_LEAST_PART: Final = 5 << 20
"""S3 takes no smaller one but the last."""
_DELETED_AT_ONCE: Final = 1000
_REPLACED_TRIES: Final = 3
_ENGINES: Final = ("auto", "obstore", "botocore")
_NO_BATCH: Final = frozenset(
    {"NotImplemented", "MethodNotAllowed", "MissingContentMD5", "InvalidRequest", "MalformedXML"}
)
"""Answers of servers that cannot delete many keys by one request, or not by one of botocore's."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff]")


class S3Backend(Backend):
    """A prefix of a bucket, given as `s3://bucket/prefix` (or `s3a://`).

    Requests are made by botocore, the client underneath s3fs; ranges are read by obstore where it is installed.
    Credentials, region, endpoint and CA bundle come from `storage_options`, else from where botocore looks: AWS_*
    variables (AWS_ENDPOINT_URL and AWS_ENDPOINT_URL_S3 among them), profiles, SSO, container and instance roles.
    Bodies carry a CRC-32C that the server checks; `config_kwargs={"request_checksum_calculation": "when_required"}`
    (or AWS_REQUEST_CHECKSUM_CALCULATION) leaves it out for servers that do not know it. With an endpoint of one's own
    the bucket is part of the path, unless `config_kwargs={"s3": {"addressing_style": "virtual"}}`.

    A process that is killed while it uploads leaves parts that no listing shows: give the bucket a lifecycle rule
    (AbortIncompleteMultipartUpload).

    Args:
        url: Bucket and prefix. What follows the bucket is taken literally.
        storage_options: s3fs's: key, secret, token, anon, profile, endpoint_url, use_ssl, requester_pays,
            client_kwargs (region_name, endpoint_url, verify, …), config_kwargs (botocore's Config),
            s3_additional_kwargs (ServerSideEncryption, StorageClass, …: sent with the requests that take them).
            fsspec's configuration for `s3` lies underneath.
        engine: What reads ranges: `obstore`, `botocore`, or `auto` for obstore where it is installed and knows all
            the options that are given.
        part_bytes: Size of the parts of an upload; larger where an object would have more than 9,000.
        put_below: Objects smaller than this are stored by one request, from one to this many bytes in memory.
        write_in_flight: Parts of one object sent at a time.
        read_in_flight: Requests for ranges at a time, by all threads together.
        coalesce_gap, max_read_bytes: As in `Backend`.
        retries: Times a request is sent again after a temporary failure (connections, timeouts, 429 and 5xx answers,
            bodies cut short).
        retry_seconds: Since its first try, after which it is not sent again. A server that has never answered is
            given four seconds.
    """

    name: ClassVar[str] = "s3"
    remote: ClassVar[bool] = True
    shares_page_cache: ClassVar[bool] = False

    # Servers exist that ignore If-None-Match, so that names carry the attempt instead.
    conditional_create = False

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, object] | None = None,
        engine: str = "auto",
        part_bytes: int = 16 << 20,
        put_below: int = 64 << 20,
        write_in_flight: int = 8,
        read_in_flight: int = 16,
        coalesce_gap: int = 1 << 20,
        max_read_bytes: int = 16 << 20,
        retries: int = 10,
        retry_seconds: float = 120,
    ) -> None:
        found = _URL.fullmatch(url)
        if found is None:
            raise InvalidArgumentError(f"{url!r} is no URL of S3; expected s3://bucket/prefix.")
        if engine not in _ENGINES:
            raise InvalidArgumentError(f"engine is {engine!r}; expected one of {list(_ENGINES)}.")
        for option, value, least in (
            ("part_bytes", part_bytes, _LEAST_PART),
            ("put_below", put_below, 1),
            ("write_in_flight", write_in_flight, 1),
            ("read_in_flight", read_in_flight, 1),
            ("coalesce_gap", coalesce_gap, 0),
            ("max_read_bytes", max_read_bytes, 1),
            ("retries", retries, 0),
            ("retry_seconds", retry_seconds, 0),
        ):
            if value < least:
                raise InvalidArgumentError(f"{option} is {value}; expected at least {least}.")
        bucket, prefix = found[1], found[2].rstrip("/")
        self.url = f"{url.partition('://')[0].lower()}://{bucket}" + (f"/{prefix}" if prefix else "")
        self.coalesce_gap = coalesce_gap
        self.max_read_bytes = max_read_bytes
        self.write_window = max(put_below, part_bytes * (write_in_flight + 2))
        self._prefix = f"{prefix}/" if prefix else ""
        self._engine = engine
        self._part_bytes = part_bytes
        self._put_below = put_below
        self._write_in_flight = write_in_flight
        self._requests = max(read_in_flight, write_in_flight)
        self._read_slots = threading.BoundedSemaphore(read_in_flight)
        self._retries = Retries(retries, retry_seconds)
        self._client = S3Client(
            bucket, S3Options.parse(storage_options), connections=read_in_flight + write_in_flight + 2
        )
        self._lock = threading.Lock()
        self._pool: Threads | None = None
        self._reader: Reader | None = None

    def prepare(self) -> None:
        # There is nothing to make; what is wrong with the bucket or the credentials is told before data moves.
        with self._translating("use"):
            self._retries.call(lambda: self._client.probe(self._prefix))

    def list_keys(self, under: str = "", *, recursive: bool = False) -> list[KeyInfo]:
        folder = self._prefix + (f"{checked_key(under)}/" if under else "")
        found = []
        with self._translating("list"):
            for item in self._client.list(folder, recursive=recursive, call=self._retries.call):
                key = item.key.removeprefix(self._prefix)
                # Objects that stand for folders ("folder/"), and names that are no key of ours.
                if can_be_key(key):
                    found.append(KeyInfo(key, item.size, item.modified))
        return sorted(found, key=lambda info: info.key)

    def list_folders(self) -> list[str]:
        with self._translating("list"):
            names = [
                name.removeprefix(self._prefix).rstrip("/")
                for name in self._client.list_folders(self._prefix, call=self._retries.call)
            ]
        return sorted(filter(can_be_key, names))

    def size(self, key: str) -> int:
        name = self._name(key)
        with self._translating("look at", key):
            return self._retries.call(lambda: self._client.head(name)).size

    def read(self, key: str) -> bytes:
        name = self._name(key)
        with self._translating("read", key):
            return self._retries.call(lambda: self._client.get_whole(name))

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        name = self._name(key)
        views = checked_buffers(key, ranges, into)
        wanted = fetches(ranges, views, gap=self.coalesce_gap, most_bytes=self.max_read_bytes)
        check_empty(self, key, ranges)
        with self._translating("read", key):
            for _ in range(_REPLACED_TRIES):
                try:
                    self._fetch_all(_Reading(name), wanted)
                except _ReplacedError:
                    continue
                except _TruncatedError as short:
                    beyond = next((range_ for range_ in ranges if range_.stop > short.size), None)
                    if beyond is None:
                        continue
                    raise truncated(key, self.url, beyond, short.size) from None
                return
        raise StorageError(
            f"{key!r} in {self.url} was replaced {_REPLACED_TRIES} times while it was read. Something writes it again "
            "and again: read it when that has ended."
        )

    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        name = self._name(key)
        if exclusive:
            raise NotSupportedError(f"{self.url} cannot create {key!r} exclusively: not every S3 server can.")
        if size < 0:
            raise InvalidArgumentError(f"key {key!r}: {size} bytes were announced.")
        with self._translating("write", key):
            upload = Upload(self._client, self._retries, self._threads(), name, in_flight=self._write_in_flight)
            if size < self._put_below:
                [part] = PartCutter(key, buffers, size=size, part_bytes=max(1, size))
                upload.put(part.views)
                return
            part_bytes = part_size(size, self._part_bytes)
            window = self.write_window or 0
            parts = PartCutter(
                key,
                buffers,
                size=size,
                part_bytes=part_bytes,
                # A part is never older than the window, unless it is as large itself (objects over 1.4 TB).
                copy=part_bytes > window,
                before_each=lambda received: upload.release(received - window),
            )
            upload.put_parts(parts, size=size)

    def publish(self, key: str, data: bytes) -> None:
        name = self._name(key)
        with self._translating("publish", key):
            upload = Upload(self._client, self._retries, self._threads(), name, in_flight=1)
            upload.put([memoryview(data)])

    def delete(self, keys: Iterable[str]) -> None:
        names = {self._name(key): key for key in keys}
        failures: dict[str, RequestFailedError] = {}
        single = [name for name in names if _CONTROL.search(name)]  # XML cannot hold these
        together = [name for name in names if not _CONTROL.search(name)]
        for start in range(0, len(together), _DELETED_AT_ONCE):
            failures |= self._delete_batch(together[start : start + _DELETED_AT_ONCE])
        failures |= self._delete_singly(single)
        if failures:
            name, failure = next(iter(failures.items()))
            error = self._place().error(failure, doing="delete", key=names[name])
            if len(failures) > 1:
                error.args = (f"{error} ({len(failures)} keys could not be deleted.)",)
            raise error from failure

    def remove_leftovers(self, *, silent_for: float, belongs: Callable[[str], bool]) -> None:
        call = self._retries.call
        with self._translating("clear away what killed writers left in"):
            for left in list(self._client.uploads_under(self._prefix, call=call)):
                if left.age < silent_for or not belongs(left.key.removeprefix(self._prefix)):
                    continue
                # Its writer may be slow, not dead.
                if self._client.seconds_since_last_part(left.key, left.upload, call=call) >= silent_for:
                    call(partial(self._client.abort_upload, left.key, left.upload))

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
            self._reader = None
        if pool is not None:
            pool.shutdown()
        self._client.close()

    # Reading

    def _fetch_all(self, reading: _Reading, wanted: Sequence[Fetch]) -> None:
        if not wanted:
            return
        reader = self._open_reader()
        if len(wanted) == 1:
            self._fetch(reader, reading, wanted[0])
            return
        pool = self._threads()
        running = [pool.submit(self._fetch, reader, reading, fetch) for fetch in wanted]
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
        with self._read_slots:
            self._retries.call(lambda: self._fetch_once(reader, reading, fetch.range, buffer), stop=reading.stop)
        if into is None:
            fetch.scatter(buffer)

    def _fetch_once(self, reader: Reader, reading: _Reading, range_: ByteRange, into: memoryview) -> None:
        try:
            got = reader.fetch(reading.name, range_, into, etag=reading.condition, stop=reading.stop)
        except RequestFailedError as failure:
            if failure.status == 412:
                raise _ReplacedError from failure
            if failure.status == 416:
                raise _TruncatedError(self._client.head(reading.name).size) from failure
            raise
        reading.agree(got)
        if range_.stop > got.size:
            raise _TruncatedError(got.size)
        if got.filled != range_.length:
            raise RequestFailedError(
                "ShortBody", f"{got.filled} bytes came where {range_.length} were asked for", temporary=True
            )

    def _open_reader(self) -> Reader:
        with self._lock:
            if self._reader is None:
                self._reader = self._retries.call(lambda: open_reader(self._client, self._engine, _LOG.info))
            return self._reader

    # Deleting

    def _delete_batch(self, names: list[str]) -> dict[str, RequestFailedError]:
        if len(names) == 1:
            return self._delete_singly(names)
        failures: dict[str, RequestFailedError] = {}
        left = names

        def request() -> None:
            nonlocal left
            found = self._client.delete_many(left)
            for name in left:
                failures.pop(name, None)
            failures.update(found)
            left = [name for name, failure in found.items() if failure.temporary]
            if left:
                raise found[left[0]]

        try:
            self._retries.call(request)
        except RequestFailedError as failure:
            if failures:
                return failures
            if failure.code in _NO_BATCH:
                return self._delete_singly(names)
            return dict.fromkeys(names, failure)
        return failures

    def _delete_singly(self, names: list[str]) -> dict[str, RequestFailedError]:
        failures = {}
        for name in names:
            try:
                self._retries.call(partial(self._client.delete, name))
            except RequestFailedError as failure:
                if failure.code != "NoSuchKey":
                    failures[name] = failure
        return failures

    # Everything

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _threads(self) -> Threads:
        with self._lock:
            if self._pool is None:
                self._pool = Threads(self._requests, thread_name_prefix="hpdcp-s3")
            return self._pool

    def _place(self) -> Place:
        return Place(self.url, self._client.bucket, self._client.endpoint)

    @contextmanager
    def _translating(self, doing: str, key: str | None = None) -> Iterator[None]:
        try:
            yield
        except RequestFailedError as failure:
            error = self._place().error(self._named(failure), doing=doing, key=key)
            error.may_be_done = failure.may_be_done
            raise error from failure

    def _named(self, failure: RequestFailedError) -> RequestFailedError:
        """`failure`, or what a request with a body in its answer says where `failure` is a bare status of HEAD."""
        if failure.code not in ("404", "NotFound", "403", "Forbidden"):
            return failure
        try:
            self._retries.call(lambda: self._client.probe(self._prefix))
        except RequestFailedError as told:
            return told if told.status == failure.status else failure
        return failure


class _ReplacedError(Exception):
    """The key was replaced between two requests of one call."""


class _TruncatedError(Exception):
    """The key is shorter than a request."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


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
        """Raise _ReplacedError unless `got` is of the same version as the answers before."""
        with self._lock:
            if self._size is None:
                self._size, self._etag = got.size, got.etag
            elif (self._size, self._etag) != (got.size, got.etag):
                raise _ReplacedError
