"""Objects stored from a sequence of buffers: one request for small ones, parts in parallel for large ones."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from hpdcp._base.backend import as_bytes
from hpdcp._base.errors import InvalidArgumentError
from hpdcp_backends._s3.body import Body
from hpdcp_backends._s3.client import S3Client, UploadedPart
from hpdcp_backends._s3.errors import CONDITION_FAILED, MISSING, RequestFailedError
from hpdcp_backends._s3.retry import Retries

_LOG: Final = logging.getLogger("hpdcp_backends.s3")
_COPIED_BELOW: Final = 256 << 10
"""Smaller buffers are copied into one block: sending each for itself costs more than the copy."""
_MOST_PARTS: Final = 9000
"""S3 allows 10,000."""
_ROUNDED_TO: Final = 1 << 20
_CLOCK_STEP: Final = timedelta(seconds=2)


def part_size(size: int, least: int) -> int:
    """Bytes per part of an object of `size` bytes: `least`, more where it would need more than 9,000 parts.

    >>> part_size(100 << 30, 16 << 20) >> 20
    16
    >>> part_size(5 << 40, 16 << 20) >> 20
    583
    """
    needed = -(-size // _MOST_PARTS)
    return max(least, -(-needed // _ROUNDED_TO) * _ROUNDED_TO)


@dataclass
class UploadPart:
    """Bytes of the object that one request sends."""

    views: list[memoryview] = field(default_factory=list)
    size: int = 0
    pinned: int | None = None
    """Where in the object the first buffer ends whose own memory is sent; None where all of it is copied."""


class PartCutter:
    """Cuts buffers into parts of `part_bytes`; iterate it in the producer's thread.

    Args:
        buffers: Asked for one by one.
        size: Bytes that they hold together.
        part_bytes: Of all parts but the last one.
        copy: Whether nothing may keep a buffer's memory.
        before_each: Called before a buffer is asked for, with the bytes received so far.
    """

    def __init__(
        self,
        key: str,
        buffers: Iterable[memoryview],
        *,
        size: int,
        part_bytes: int,
        copy: bool = False,
        before_each: Callable[[int], None] = lambda received: None,
    ) -> None:
        self._key = key
        self._buffers = iter(buffers)
        self._size = size
        self._part_bytes = part_bytes
        self._copy = copy
        self._before_each = before_each
        self._block = memoryview(bytearray())
        """Where small buffers are copied to."""
        self._used = 0
        self._from: int | None = None
        """Where in the block the last view of the current part starts; None where that view is a buffer's own."""

    def __iter__(self) -> Iterator[UploadPart]:
        """The parts in order, the last one shorter; InvalidArgumentError unless the total is `size`.

        It is found out before the last part is handed out, so that an object of one part is not begun in vain.
        """
        part, received = UploadPart(), 0
        while True:
            self._before_each(received)
            buffer = next(self._buffers, None)
            if buffer is None:
                break
            view = as_bytes(buffer)
            received += len(view)
            if received > self._size:
                raise self._other_total(f"at least {received}")
            while len(view):
                if part.size == self._part_bytes:
                    yield part
                    part = UploadPart()
                taken = view[: self._part_bytes - part.size]
                view = view[len(taken) :]
                self._add(part, taken, received)
        if received != self._size:
            raise self._other_total(str(received))
        yield part

    def _add(self, part: UploadPart, view: memoryview, end: int) -> None:
        part.size += len(view)
        if not self._copy and len(view) >= _COPIED_BELOW:
            part.views.append(view)
            part.pinned = end if part.pinned is None else part.pinned
            self._from = None
            return
        while len(view):
            if self._used == len(self._block):
                self._block = memoryview(bytearray(self._part_bytes if self._copy else _COPIED_BELOW))
                self._used, self._from = 0, None
            count = min(len(view), len(self._block) - self._used)
            self._block[self._used : self._used + count] = view[:count]
            if self._from is None or not part.views:
                self._from = self._used
                part.views.append(self._block[:0])
            self._used += count
            part.views[-1] = self._block[self._from : self._used]
            view = view[count:]

    def _other_total(self, received: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"key {self._key!r}: the buffers hold {received} bytes, but {self._size} were announced."
        )


class Upload:
    """One object being stored; raises RequestFailedError, and what the buffers' producer raises.

    After a failure of any kind nothing of it is left on the server, and what was stored under the key stands. An
    object carries the mark of the call that stored it, so that a lost answer is not taken for a failure.
    """

    def __init__(
        self, client: S3Client, retries: Retries, pool: ThreadPoolExecutor, key: str, *, in_flight: int
    ) -> None:
        self._client = client
        self._retries = retries
        # What failed has tried long enough; a server that starts again is waited for.
        self._cleaning = replace(retries, most=min(retries.most, 7), seconds=min(retries.seconds, 30))
        self._pool = pool
        self._key = key
        self._in_flight = in_flight
        self._mark = secrets.token_hex(8)
        self._stop = threading.Event()
        self._running: dict[Future[UploadedPart], int | None] = {}
        self._stored: list[UploadedPart] = []

    def put(self, views: list[memoryview], **conditions: str) -> None:
        """Store the views as one object, by one request, under conditions such as IfMatch."""
        doubts: list[RequestFailedError] = []

        def send() -> None:
            body = Body(views, self._stop)
            try:
                self._retries.call(
                    lambda: self._client.put(self._key, body, mark=self._mark, conditions=conditions),
                    stop=self._stop,
                    doubts=doubts,
                )
            except RequestFailedError as failure:
                if not doubts or not self._is_stored(len(body)):
                    # What the conditions have refused once they refuse whenever it arrives.
                    failure.may_be_done = bool(doubts) and failure.code not in CONDITION_FAILED
                    raise

        running = self._pool.submit(send)
        try:
            # Not in this thread: an interrupt would leave a connection half read.
            running.result()
        except BaseException:
            self._stop.set()
            wait([running])
            raise

    def put_parts(self, parts: Iterable[UploadPart], *, size: int) -> None:
        """Store the parts as one object, several at a time, while they are made."""
        upload = self._create()
        try:
            for number, part in enumerate(parts, 1):
                while len(self._running) >= self._in_flight:
                    self._collect()
                self._running[self._pool.submit(self._send, upload, number, part)] = part.pinned
            while self._running:
                self._collect()
            self._complete(upload, size)
        except BaseException:
            self._stop.set()
            for running in self._running:
                running.cancel()
            # A part that arrives after the abort would stay, and cost money.
            wait(self._running)
            self._abort(upload)
            raise

    def release(self, before: int) -> None:
        """Return when no part in flight uses a buffer that ends at `before` or earlier."""
        while any(pinned is not None and pinned <= before for pinned in self._running.values()):
            self._collect()

    def _collect(self) -> None:
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            del self._running[future]
        self._stored += [future.result() for future in done]

    def _send(self, upload: str, number: int, part: UploadPart) -> UploadedPart:
        body = Body(part.views, self._stop)
        return self._retries.call(lambda: self._client.put_part(self._key, upload, number, body), stop=self._stop)

    def _create(self) -> str:
        # Not in this thread: an upload whose id an interrupt threw away would stay.
        running = self._pool.submit(self._create_surely)
        try:
            return running.result()
        except BaseException:
            self._stop.set()
            wait([running])
            if running.exception() is None:
                self._abort(running.result())
            raise

    def _create_surely(self) -> str:
        """The upload's id; others that tries with lost answers began are gone."""
        start = time.monotonic()
        doubts: list[RequestFailedError] = []
        mine = None
        try:
            mine = self._retries.call(
                lambda: self._client.create_upload(self._key, mark=self._mark), stop=self._stop, doubts=doubts
            )
        finally:
            if doubts:
                self._abort_others(mine, seconds=time.monotonic() - start)
        return mine

    def _abort_others(self, mine: str | None, *, seconds: float) -> None:
        """Abort uploads of the key begun within the last `seconds`, but `mine`. A key has one writer at a time."""
        try:
            uploads, now = self._cleaning.call(lambda: self._client.open_uploads(self._key))
        except RequestFailedError as failure:
            _LOG.warning("cannot look for lost uploads of %r: %s", self._key, failure)
            return
        for upload, begun in uploads:
            if upload != mine and begun >= now - timedelta(seconds=seconds) - _CLOCK_STEP:
                self._abort(upload)

    def _complete(self, upload: str, size: int) -> None:
        parts = sorted(self._stored, key=lambda part: part.number)
        doubts: list[RequestFailedError] = []
        try:
            self._retries.call(lambda: self._client.complete_upload(self._key, upload, parts), doubts=doubts)
        except RequestFailedError:
            if not doubts or not self._is_stored(size):
                raise
            return
        head = self._retries.call(lambda: self._client.head(self._key))
        if head.mark == self._mark and head.size != size:
            raise RequestFailedError("WrongSize", f"{size} bytes were sent, but the server holds {head.size}")

    def _is_stored(self, size: int) -> bool:
        """Whether the object of this call is there in spite of a failure."""
        try:
            head = self._cleaning.call(lambda: self._client.head(self._key))
        except RequestFailedError as failure:
            if failure.code not in MISSING:
                _LOG.warning("cannot see whether %r was stored after all: %s", self._key, failure)
            return False
        return head.mark == self._mark and head.size == size

    def _abort(self, upload: str) -> None:
        try:
            self._cleaning.call(lambda: self._client.abort_upload(self._key, upload))
        except RequestFailedError as failure:
            _LOG.warning(
                "cannot abort upload %s of %r in bucket %r: %s. Its parts cost money until a lifecycle rule of the "
                "bucket (AbortIncompleteMultipartUpload) removes them.",
                upload,
                self._key,
                self._client.bucket,
                failure,
            )
