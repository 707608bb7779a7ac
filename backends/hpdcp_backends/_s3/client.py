"""The requests of S3 that a backend makes, one method each, by botocore's client."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Final

from botocore.exceptions import ClientError

from hpdcp._base.backend import without_password
from hpdcp._base.errors import InvalidArgumentError
from hpdcp_backends._s3.body import Body
from hpdcp_backends._s3.errors import RequestFailedError, from_botocore
from hpdcp_backends._s3.options import S3Options

_MARK: Final = "hpdcp-write"
"""Metadata of an object that says which call of `write` stored it."""
_OPERATIONS: Final = (
    "put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload", "abort_multipart_upload",
    "list_multipart_uploads", "get_object", "head_object", "head_bucket", "list_objects_v2", "delete_object",
    "delete_objects", "list_parts",
)  # fmt: skip


class _AddressFound(Exception):  # noqa: N818 - not an error
    """Ends a request before it is sent."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url

    @classmethod
    def by(cls, request: Any, **_: object) -> None:
        raise cls(request.url)


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class LeftUpload:
    """An upload that is neither completed nor aborted."""

    key: str
    upload: str
    age: float
    """Seconds since it was begun."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a HEAD request tells."""

    size: int
    mark: str | None


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """One part of an upload, as the request that completes it names it."""

    number: int
    etag: str
    checksum: str | None

    def as_dict(self) -> dict[str, Any]:
        described = {"PartNumber": self.number, "ETag": self.etag}
        return described if self.checksum is None else described | {"ChecksumCRC32C": self.checksum}


class S3Client:
    """One bucket. Every method is one request (`list` one per page) and raises RequestFailedError.

    What is given as `key` is the object's whole name.
    """

    def __init__(self, bucket: str, options: S3Options, *, connections: int) -> None:
        self.bucket = bucket
        self.options = options
        self._connections = connections
        self._lock = threading.Lock()
        self._session: Any = None
        self._client: Any = None
        self._additional: dict[str, dict[str, Any]] = {}

    @property
    def session(self) -> Any:
        """botocore's session, which knows the credentials; made when first used."""
        self._connect()
        return self._session

    @property
    def raw(self) -> Any:
        """botocore's client; made when first used."""
        self._connect()
        return self._client

    def _connect(self) -> None:
        with _translated(), self._lock:
            if self._client is None:
                self._session = self.options.session()
                client = self.options.connect(self._session, connections=self._connections)
                self._additional = _parameters_by_operation(client, self.options.additional)
                self._client = client
                # Its parts refer to one another: without this its connections stay until garbage is collected, which
                # training jobs often switch off.
                weakref.finalize(self, client.close).atexit = False

    @property
    def endpoint(self) -> str:
        """Where requests go, for messages."""
        known = self._client.meta.endpoint_url if self._client else self.options.client.get("endpoint_url", "AWS")
        return without_password(str(known))

    @property
    def _checksums(self) -> bool:
        return bool(self.raw.meta.config.request_checksum_calculation != "when_required")

    def object_url(self, key: str) -> str:
        """Where `key` is: with the bucket in the host or in the path, as the options and the endpoint have it."""
        # The request itself is asked, and not sent. A presigned URL leads to AWS's global host, whatever the region.
        with _translated(), closing(self.options.connect(self.session, connections=1)) as client:
            client.meta.events.register("before-send.s3.GetObject", _AddressFound.by)
            try:
                client.get_object(Bucket=self.bucket, Key=key)
            except _AddressFound as found:
                return found.url
        raise AssertionError("the request was sent")

    @property
    def is_aws(self) -> bool:
        """Whether requests go to AWS itself."""
        host: str = self.raw.meta.endpoint_url.split("/")[2]
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def region(self) -> str:
        """The region that requests are signed for; asked of the bucket itself where the server is AWS's."""
        name = self.raw.meta.region_name
        if self.is_aws:
            with _translated():
                answer = self._call("head_bucket")
            name = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", name)
        return "us-east-1" if name in (None, "aws-global") else str(name)

    def head(self, key: str) -> Head:
        with _translated():
            answer = self._call("head_object", Key=key)
        return Head(int(answer["ContentLength"]), answer.get("Metadata", {}).get(_MARK))

    def get(self, key: str, **conditions: str) -> dict[str, Any]:
        """The answer, whose Body is to be read inside `reading`."""
        with _translated():
            answer: dict[str, Any] = self._call("get_object", Key=key, **conditions)
        return answer

    def get_whole(self, key: str) -> tuple[bytes, str]:
        """All bytes, and the tag of this version of the object."""
        answer = self.get(key)
        with _translated(), closing(answer["Body"]) as body:
            data: bytes = body.read()
        return data, answer["ETag"]

    def put(self, key: str, body: Body, *, mark: str, conditions: Mapping[str, str]) -> None:
        """`conditions`: parameters such as IfMatch."""
        checksum = {"ChecksumCRC32C": body.crc32c()} if self._checksums else {}
        body.seek(0)
        with _translated():
            self._call("put_object", Key=key, Body=body, Metadata=self._metadata(mark), **checksum, **conditions)

    def create_upload(self, key: str, *, mark: str) -> str:
        """The upload's id."""
        checksum = {"ChecksumAlgorithm": "CRC32C"} if self._checksums else {}
        with _translated():
            answer = self._call("create_multipart_upload", Key=key, Metadata=self._metadata(mark), **checksum)
        return str(answer["UploadId"])

    def put_part(self, key: str, upload: str, number: int, body: Body) -> UploadedPart:
        checksum = body.crc32c() if self._checksums else None
        given = {} if checksum is None else {"ChecksumCRC32C": checksum}
        body.seek(0)
        with _translated():
            answer = self._call("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=body, **given)
        # A server that does not know the checksum does not repeat it, and must not be told of it at the end.
        return UploadedPart(number, answer["ETag"], checksum if "ChecksumCRC32C" in answer else None)

    def complete_upload(self, key: str, upload: str, parts: Sequence[UploadedPart]) -> None:
        with _translated():
            described = [part.as_dict() for part in parts]
            self._call("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": described})

    def abort_upload(self, key: str, upload: str) -> None:
        """Nothing happens where the upload is gone."""
        try:
            with _translated():
                self._call("abort_multipart_upload", Key=key, UploadId=upload)
        except RequestFailedError as failure:
            if failure.code != "NoSuchUpload" and failure.status != 404:
                raise

    def open_uploads(self, key: str) -> tuple[list[tuple[str, datetime]], datetime]:
        """Id and start of every upload of exactly this key that is neither completed nor aborted; the server's time."""
        with _translated():
            answer = self._call("list_multipart_uploads", Prefix=key)
        found = [(item["UploadId"], item["Initiated"]) for item in answer.get("Uploads", ()) if item["Key"] == key]
        return found, _date(answer)

    def uploads_under(self, prefix: str, *, call: Callable[[Callable[[], Any]], Any]) -> Iterator[LeftUpload]:
        """Every upload under `prefix` that is neither completed nor aborted, in pages that `call` requests."""
        parameters: dict[str, Any] = {"Prefix": prefix}
        while True:
            page = call(partial(self._request, "list_multipart_uploads", **parameters))
            now = _date(page)
            for item in page.get("Uploads", ()):
                yield LeftUpload(item["Key"], item["UploadId"], (now - item["Initiated"]).total_seconds())
            if not page.get("IsTruncated"):
                return
            parameters |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

    def seconds_since_last_part(self, key: str, upload: str, *, call: Callable[[Callable[[], Any]], Any]) -> float:
        """Infinite where the upload has no part, or is gone."""
        parameters: dict[str, Any] = {"Key": key, "UploadId": upload}
        silent: float = math.inf
        while True:
            try:
                page = call(partial(self._request, "list_parts", **parameters))
            except RequestFailedError as failure:
                if failure.code == "NoSuchUpload":
                    return math.inf
                raise
            now = _date(page)
            for part in page.get("Parts", ()):
                silent = min(silent, (now - part["LastModified"]).total_seconds())
            if not page.get("IsTruncated"):
                return silent
            parameters["PartNumberMarker"] = page["NextPartNumberMarker"]

    def list(self, prefix: str, *, recursive: bool, call: Callable[[Callable[[], Any]], Any]) -> Iterator[Listed]:
        """Objects under `prefix`, in pages that are each requested by `call`."""
        for page in self._pages({"Prefix": prefix} if recursive else {"Prefix": prefix, "Delimiter": "/"}, call):
            for item in page.get("Contents", ()):
                yield Listed(item["Key"], int(item["Size"]), item["LastModified"].timestamp())

    def list_folders(self, prefix: str, *, call: Callable[[Callable[[], Any]], Any]) -> Iterator[str]:
        """The prefixes of objects under `prefix` up to the next slash, with it; as `list`."""
        for page in self._pages({"Prefix": prefix, "Delimiter": "/"}, call):
            yield from (item["Prefix"] for item in page.get("CommonPrefixes", ()))

    def _pages(self, parameters: dict[str, Any], call: Callable[[Callable[[], Any]], Any]) -> Iterator[dict[str, Any]]:
        while True:
            page = call(partial(self._list_page, parameters))
            yield page
            if not page.get("IsTruncated"):
                return
            parameters = {**parameters, "ContinuationToken": page["NextContinuationToken"]}

    def probe(self, prefix: str) -> None:
        """Ask for anything at all, to learn whether the bucket answers."""
        self._list_page({"Prefix": prefix, "MaxKeys": 1})

    def delete(self, key: str) -> None:
        with _translated():
            self._call("delete_object", Key=key)

    def delete_many(self, keys: Sequence[str]) -> dict[str, RequestFailedError]:
        """What went wrong, by key; up to 1,000 keys."""
        with _translated():
            named = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            answer = self._call("delete_objects", Delete=named)
        return {
            item["Key"]: from_botocore(_as_client_error(item))
            for item in answer.get("Errors", ())
            if item.get("Code") != "NoSuchKey"
        }

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _list_page(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        with _translated():
            page: dict[str, Any] = self._call("list_objects_v2", **parameters)
        return page

    def _request(self, operation: str, **parameters: Any) -> Any:
        with _translated():
            return self._call(operation, **parameters)

    def _metadata(self, mark: str) -> dict[str, str]:
        return {**self.options.additional.get("Metadata", {}), _MARK: mark}

    def _call(self, operation: str, **parameters: Any) -> Any:
        client, additional = self.raw, self._additional.get(operation, {})
        return getattr(client, operation)(**{**additional, **parameters, "Bucket": self.bucket})


def _parameters_by_operation(client: Any, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Which of the options' additional parameters go with which request; InvalidArgumentError where none takes one."""
    found = {}
    for operation in _OPERATIONS:
        model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation])
        found[operation] = {name: value for name, value in given.items() if name in model.input_shape.members}
    unknown = sorted(set(given).difference(*found.values()))
    if unknown:
        raise InvalidArgumentError(f"s3_additional_kwargs {unknown}: no request of S3's takes these.")
    return found


def _date(answer: Mapping[str, Any]) -> datetime:
    """When the server answered, by its own clock."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(date) if date else datetime.now(UTC)


def _as_client_error(item: Mapping[str, Any]) -> Exception:
    error: Exception = ClientError(
        {"Error": {"Code": item.get("Code", "Unknown"), "Message": item.get("Message", "")}}, "DeleteObjects"
    )
    return error


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise from_botocore(error) from error


reading = _translated
