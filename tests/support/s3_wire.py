"""What the proxy must know of HTTP and of S3 to pass requests on: where they end, and what they ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from urllib.parse import parse_qs, urlsplit


def parse_answer(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and fields."""
    line, headers = parse_head(head)
    return int(line.split(" ", 2)[1]), headers


def parse_head(head: bytes) -> tuple[str, dict[str, str]]:
    """The first line, and the fields by their names in lower case."""
    line, *rest = head.decode("latin-1").split("\r\n")
    fields = (entry.partition(":") for entry in rest if entry)
    return line, {name.strip().lower(): value.strip() for name, _, value in fields}


def operation_of(method: str, target: str, headers: Mapping[str, str]) -> str:
    """S3's name of a request in path style."""
    where = urlsplit(target)
    query = parse_qs(where.query, keep_blank_values=True)
    key = where.path.strip("/").partition("/")[2]
    if not key:
        named = {
            "GET uploads": "ListMultipartUploads",
            "GET location": "GetBucketLocation",
            "POST delete": "DeleteObjects",
        }
        plain = {"GET": "ListObjects", "HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}
    else:
        named = {
            "POST uploads": "CreateMultipartUpload",
            "POST uploadId": "CompleteMultipartUpload",
            "PUT partNumber": "UploadPart",
            "DELETE uploadId": "AbortMultipartUpload",
            "GET uploadId": "ListParts",
        }
        copy = "x-amz-copy-source" in headers
        put = "CopyObject" if copy else "PutObject"
        plain = {"GET": "GetObject", "HEAD": "HeadObject", "PUT": put, "DELETE": "DeleteObject"}
    for name in query:
        if f"{method} {name}" in named:
            return named[f"{method} {name}"]
    return plain.get(method, method)


async def body_blocks(
    reader: asyncio.StreamReader, headers: Mapping[str, str], most: int, *, until_closed: bool
) -> AsyncIterator[bytes]:
    """The body as it arrives, in blocks of at most `most` bytes, with the framing of its chunks where it has any."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while True:
            line = await reader.readuntil(b"\r\n")
            yield line
            size = int(line.split(b";")[0], 16)
            async for block in _exactly(reader, size + 2, most) if size else _trailers(reader):
                yield block
            if not size:
                return
    if until_closed:
        while block := await reader.read(most):
            yield block
        return
    async for block in _exactly(reader, int(headers.get("content-length", "0")), most):
        yield block


async def _exactly(reader: asyncio.StreamReader, size: int, most: int) -> AsyncIterator[bytes]:
    while size:
        block = await reader.read(min(size, most))
        if not block:
            raise asyncio.IncompleteReadError(b"", size)
        size -= len(block)
        yield block


async def _trailers(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    line = b""
    while line != b"\r\n":
        line = await reader.readuntil(b"\r\n")
        yield line
