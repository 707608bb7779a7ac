"""Buckets of S3 and of the servers that speak its protocol."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Final

from hpdcp._base.backend import (
    Backend,
    ByteRange,
    KeyInfo,
    can_be_key,
    check_empty,
    check_unchanged,
    checked_buffers,
    checked_key,
    fetches,
    truncated,
)
from hpdcp._base.errors import InvalidArgumentError, NotSupportedError, StorageError
from hpdcp._base.threads import Threads
from hpdcp._base.timing import log_once
from hpdcp_backends._s3.client import S3Client
from hpdcp_backends._s3.deletion import Deletion
from hpdcp_backends._s3.errors import CONDITION_FAILED, MISSING, Location, RequestFailedError
from hpdcp_backends._s3.options import S3Options
from hpdcp_backends._s3.ranges import RangeFetcher, ReplacedError, TruncatedError
from hpdcp_backends._s3.retry import Retries
from hpdcp_backends._s3.upload import PartCutter, Upload, part_size
from hpdcp_backends._tunables import at_least

_URL: Final = re.compile(r"(?i:s3a?)://([^/]+)/*(.*)", re.DOTALL)
_LEAST_PART: Final = 5 << 20
"""S3 takes no smaller one but the last."""
_REPLACED_TRIES: Final = 3
_ENGINES: Final = ("auto", "obstore", "botocore")


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
        coalesce_gap, max_read_bytes, max_concurrent_reads: As in `Backend`.
        retries: Times a request is sent again after a temporary failure (connections, timeouts, 429 and 5xx answers,
            bodies cut short).
        conditional_publish: Whether the server honours If-Match and If-None-Match of a PUT, so that of two jobs that
            commit to one folder at the same moment one is refused. None: AWS does; of other servers it is not taken
            for granted, and they are sent the headers all the same. False: they are not sent.
        retry_seconds: Since its first try, after which it is not sent again. A server that has never answered is
            given four seconds.
    """

    name: ClassVar[str] = "s3"
    remote: ClassVar[bool] = True
    shares_page_cache: ClassVar[bool] = False

    # Servers exist that ignore If-None-Match, so that names carry the attempt instead. Where one is ignored, nothing
    # is worse than without it: `publish_if` sends it, and claims it only of servers that are known.
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
        max_concurrent_reads: int = Backend.max_concurrent_reads,
        conditional_publish: bool | None = None,
        retries: int = 10,
        retry_seconds: float = 120,
    ) -> None:
        found = _URL.fullmatch(url)
        if found is None:
            raise InvalidArgumentError(f"{url!r} is no URL of S3; expected s3://bucket/prefix.")
        if engine not in _ENGINES:
            raise InvalidArgumentError(f"engine is {engine!r}; expected one of {list(_ENGINES)}.")
        at_least("part_bytes", part_bytes, _LEAST_PART)
        at_least("put_below", put_below, 1)
        at_least("write_in_flight", write_in_flight, 1)
        at_least("read_in_flight", read_in_flight, 1)
        at_least("coalesce_gap", coalesce_gap, 0)
        at_least("max_read_bytes", max_read_bytes, 1)
        at_least("max_concurrent_reads", max_concurrent_reads, 1)
        at_least("retries", retries, 0)
        at_least("retry_seconds", retry_seconds, 0)
        if conditional_publish is not None and not isinstance(conditional_publish, bool):
            raise InvalidArgumentError(f"conditional_publish is {conditional_publish!r}; expected true or false.")
        bucket, prefix = found[1], found[2].rstrip("/")
        self.url = f"{url.partition('://')[0].lower()}://{bucket}" + (f"/{prefix}" if prefix else "")
        self.coalesce_gap = coalesce_gap
        self.max_read_bytes = max_read_bytes
        self.max_concurrent_reads = max_concurrent_reads
        self.write_window = max(put_below, part_bytes * (write_in_flight + 2))
        self._conditions = conditional_publish
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_bytes = part_bytes
        self._put_below = put_below
        self._write_in_flight = write_in_flight
        self._requests = max(read_in_flight, write_in_flight)
        self._retries = Retries(retries, retry_seconds)
        self._client = S3Client(
            bucket, S3Options.parse(storage_options), connections=read_in_flight + write_in_flight + 2
        )
        self._lock = threading.Lock()
        self._pool: Threads | None = None
        self._deletion = Deletion(self._client, self._retries)
        self._ranges = RangeFetcher(self._client, self._retries, engine=engine, in_flight=read_in_flight)

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
            return self._retries.call(lambda: self._client.get_whole(name))[0]

    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        name = self._name(key)
        views = checked_buffers(key, ranges, into)
        wanted = fetches(ranges, views, gap=self.coalesce_gap, most_bytes=self.max_read_bytes)
        check_empty(self, key, ranges)
        with self._translating("read", key):
            for _ in range(_REPLACED_TRIES):
                try:
                    self._ranges.fetch_all(name, wanted, pool=self._threads)
                except ReplacedError:
                    continue
                except TruncatedError as short:
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

    @property
    def conditional_publish(self) -> bool:
        if self._conditions is None:
            with self._translating("use"):
                return self._client.is_aws
        return self._conditions

    def publish_if(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        name = self._name(key)
        with self._translating("publish", key):
            found, conditions = self._read_tagged(name)
            check_unchanged(self, key, found, expected)
            upload = Upload(self._client, self._retries, self._threads(), name, in_flight=1)
            try:
                upload.put([memoryview(data)], **({} if self._conditions is False else conditions))
                return
            except RequestFailedError as failure:
                if failure.code not in CONDITION_FAILED | {"NotImplemented"} or failure.may_be_done:
                    raise
                check_unchanged(self, key, self._read_tagged(name)[0], expected)
                # Nobody changed it: this server does not understand the condition.
                log_once(logging.INFO, f"{self._client.endpoint} does not know If-Match ({failure}); it is left out.")
                self._conditions = False
        self.publish(key, data)

    def _read_tagged(self, name: str) -> tuple[bytes | None, dict[str, str]]:
        """The object's bytes, and what a request says to be refused if it is another one by then."""
        try:
            data, tag = self._retries.call(lambda: self._client.get_whole(name))
        except RequestFailedError as failure:
            if failure.code not in MISSING:
                raise
            return None, {"IfNoneMatch": "*"}
        return data, {"IfMatch": tag}

    def delete(self, keys: Iterable[str]) -> None:
        names = {self._name(key): key for key in keys}
        failures = self._deletion.delete(names)
        if failures:
            name, failure = next(iter(failures.items()))
            error = self._location().error(failure, doing="delete", key=names[name])
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
        self._ranges.close()
        if pool is not None:
            pool.shutdown()
        self._client.close()

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _threads(self) -> Threads:
        with self._lock:
            if self._pool is None:
                self._pool = Threads(self._requests, thread_name_prefix="hpdcp-s3")
            return self._pool

    def _location(self) -> Location:
        return Location(self.url, self._client.bucket, self._client.endpoint)

    @contextmanager
    def _translating(self, doing: str, key: str | None = None) -> Iterator[None]:
        try:
            yield
        except RequestFailedError as failure:
            error = self._location().error(self._named(failure), doing=doing, key=key)
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
