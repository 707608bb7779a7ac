"""A proxy in front of an S3 server that keeps count, and makes chosen requests go wrong.

Requests pass unchanged, `Host` included, since S3 signs it. A fault is tied to requests by a `Rule`: an operation of S3
("UploadPart"), a pattern for the request's line, which of those requests, and how often.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
import socket
import struct
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from tests.support.s3_wire import body_blocks, operation_of, parse_answer, parse_head

_BLOCK: Final = 256 << 10
_HEAD_LIMIT: Final = 1 << 20
_SLOW_BLOCK: Final = 16 << 10
_STOP_SECONDS: Final = 10
_REST_SECONDS: Final = 1.0
"""How long a body may still come in after the server has answered."""
_BODILESS: Final = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class CutRequest:
    """Reset both connections once so many bytes of the request's body have gone to the server.

    With 0 the server hears nothing of the request; and whatever it answers, the client hears nothing.
    """

    after: int = 0


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """Reset the client's connection once it has so many bytes of the answer's body; headers come first."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """Let the request go through, read the whole answer, and reset the client's connection instead of sending it."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Say nothing to the client for so long before the answer, then let it pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Slow:
    """Send the answer's body, and take the request's, at no more than this rate."""

    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer with this status and S3 error code; the server never hears of the request."""

    status: int
    code: str = "InternalError"


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reset the client's connection, and refuse new ones for so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Do:
    """Run `action` while the request waits, then let it pass; a server can be killed in the midst of things."""

    action: Callable[[], object]


Fault = CutRequest | CutAnswer | LoseAnswer | Stall | Slow | Answer | Refuse | Do


@dataclass(slots=True)
class Request:
    """One request that came, and what became of it."""

    method: str
    target: str
    """Path and query as they were sent."""
    operation: str
    """S3's name of it: "PutObject", "UploadPart", "GetObject", ..."""
    received: int = 0
    """Bytes of its body that went to the server."""
    served: int = 0
    """Bytes of the answer's body that went to the client."""
    status: int | None = None
    """Of the answer; None where there was none."""
    fault: Fault | None = None
    """What was done to it."""

    @property
    def line(self) -> str:
        """Method, and target with its escapes undone."""
        return f"{self.method} {unquote(self.target)}"


@dataclass(slots=True)
class Rule:
    """Which requests meet a fault."""

    fault: Fault
    operation: str | None = None
    """S3's name of the operation; None: any."""
    line: str = ""
    """A regular expression searched in `Request.line`."""
    skip: int = 0
    """So many of those requests pass before the first that does not."""
    times: int | None = 1
    """So many requests meet it; None: all."""
    hits: int = 0
    """Requests that have met it."""
    _seen: int = 0

    def meets(self, request: Request) -> bool:
        """Whether this request is one of them; counts it."""
        if self.operation not in (None, request.operation) or not re.search(self.line, request.line):
            return False
        self._seen += 1
        if self._seen <= self.skip or (self.times is not None and self.hits >= self.times):
            return False
        self.hits += 1
        return True


class Proxy:
    """Listens on a free port of loopback, in a thread of its own, until `stop`; see `proxied` for a block.

    Rules are asked in their order and the first that meets a request decides.
    """

    def __init__(self, upstream: str) -> None:
        where = urlsplit(upstream)
        assert where.hostname is not None
        assert where.port is not None
        self._upstream = (where.hostname, where.port)
        self.rules: list[Rule] = []
        self.requests: list[Request] = []
        """In the order they came."""
        self._lock = threading.Lock()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._refusals: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._port = 0
        self._run(self._listen())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def add(self, rule: Rule) -> Rule:
        """From now on, requests are held against this rule as well."""
        with self._lock:
            self.rules.append(rule)
        return rule

    def reset(self) -> None:
        """Forget all rules and requests."""
        with self._lock:
            self.rules.clear()
            self.requests.clear()

    def find(self, operation: str | None = None, line: str = "") -> list[Request]:
        """The requests so far of that operation whose line has the pattern."""
        with self._lock:
            found = list(self.requests)
        return [r for r in found if operation in (None, r.operation) and re.search(line, r.line)]

    def served(self, operation: str | None = None, line: str = "") -> int:
        """Bytes of bodies that the client got as answers to those requests."""
        return sum(request.served for request in self.find(operation, line))

    def received(self, operation: str | None = None, line: str = "") -> int:
        """Bytes of bodies that those requests sent to the server."""
        return sum(request.received for request in self.find(operation, line))

    def close_door(self) -> None:
        """Reset all connections and refuse new ones, until `open_door`."""
        self._run(self._close_door())

    def open_door(self) -> None:
        """Accept connections again, on the same port."""
        self._run(self._listen())

    def stop(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_SECONDS)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=_HEAD_LIMIT)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _close_door(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        mine = asyncio.current_task()
        others = [task for task in self._connections if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _end(self) -> None:
        for task in self._refusals:
            task.cancel()
        await asyncio.gather(*self._refusals, return_exceptions=True)
        await self._close_door()
        await self._loop.shutdown_default_executor()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writer.transport.set_write_buffer_limits(0)
        connection = _Connection(self, reader, writer)
        try:
            await connection.serve(self._upstream)
        except asyncio.CancelledError:
            connection.reset()
            # The task ends here all the same; passing it on would have the loop report it as an error.
        except (OSError, asyncio.IncompleteReadError):
            connection.reset()
        finally:
            connection.close()
            self._connections.discard(task)

    def note(self, request: Request) -> None:
        """Write the request down, and settle its fault."""
        with self._lock:
            self.requests.append(request)
            request.fault = next((rule.fault for rule in self.rules if rule.meets(request)), None)

    def refuse(self, seconds: float) -> None:
        """Start a while of refusing."""

        async def refuse() -> None:
            await self._close_door()
            await asyncio.sleep(seconds)
            await self._listen()

        task = asyncio.ensure_future(refuse())
        self._refusals.add(task)
        task.add_done_callback(self._refusals.discard)


class _ResetError(ConnectionError):
    """A fault wants both connections reset."""


class _Connection:
    """One client's connection, and the one to the server that its requests go through."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def serve(self, upstream: tuple[str, int]) -> None:
        ends = False
        while not ends:
            try:
                head = await self._client[0].readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                return
            line, headers = parse_head(head)
            method, target, _ = line.split(" ", 2)
            request = Request(method, target, operation_of(method, target, headers))
            self._proxy.note(request)
            fault = request.fault
            if fault == CutRequest(0):
                raise _ResetError
            if isinstance(fault, Refuse):
                self._proxy.refuse(fault.seconds)
                raise _ResetError
            if isinstance(fault, Do):
                await asyncio.get_running_loop().run_in_executor(None, fault.action)
            if isinstance(fault, Answer):
                await self._answer_instead(request, fault, headers)
            else:
                await self._connect(upstream)
                ends = await self._pass_on(head, request, headers)
            ends = ends or headers.get("connection", "").lower() == "close"

    async def _connect(self, upstream: tuple[str, int]) -> None:
        if self._server is not None:
            reader, writer = self._server
            if not reader.at_eof() and reader.exception() is None:
                return
            writer.transport.abort()
        self._server = await asyncio.open_connection(*upstream, limit=_HEAD_LIMIT)
        self._server[1].transport.set_write_buffer_limits(0)

    async def _pass_on(self, head: bytes, request: Request, headers: Mapping[str, str]) -> bool:
        """Send the request to the server and the answer to the client; True where the connection ends with it."""
        assert self._server is not None
        self._server[1].write(head)
        # Both at once: the server says "100 Continue", or no, while the client still holds the body back.
        body = asyncio.ensure_future(self._send_body(request, headers))
        answer = asyncio.ensure_future(self._send_answer(request))
        try:
            await asyncio.wait({body, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                body.result()
                return await answer
            ends = answer.result()
            # The server has answered before it had all of the body: it wants no more of it.
            return ends or bool((await asyncio.wait({body}, timeout=_REST_SECONDS))[1])
        finally:
            body.cancel()
            answer.cancel()
            await asyncio.gather(body, answer, return_exceptions=True)

    async def _send_body(self, request: Request, headers: Mapping[str, str]) -> None:
        assert self._server is not None
        cut = request.fault.after if isinstance(request.fault, CutRequest) else None
        try:
            async for block in _body(self._client[0], headers, request.fault, cut):
                request.received += len(block)
                self._server[1].write(block)
                await self._server[1].drain()
        except _ResetError:
            await _arrived(self._server[1])
            raise

    async def _send_answer(self, request: Request) -> bool:
        """Pass the answer on; True where the server ends the connection with it."""
        assert self._server is not None
        reader, writer = self._server[0], self._client[1]
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            status, headers = parse_answer(head)
            if status >= 200:
                break
            writer.write(head)
            await writer.drain()
        request.status = status
        fault = request.fault
        if isinstance(fault, CutRequest):
            await asyncio.Event().wait()  # the cut ends this
        if isinstance(fault, Stall):
            await asyncio.sleep(fault.seconds)
        bodiless = request.method == "HEAD" or status in _BODILESS
        until_closed = not bodiless and "content-length" not in headers and "transfer-encoding" not in headers
        if isinstance(fault, LoseAnswer):
            async for _ in _body(reader, {} if bodiless else headers, None, None, until_closed=until_closed):
                pass
            raise _ResetError
        writer.write(head)
        cut = fault.after if isinstance(fault, CutAnswer) else None
        try:
            async for block in _body(reader, {} if bodiless else headers, fault, cut, until_closed=until_closed):
                # Before the client can have it: whoever has read an answer finds it counted.
                request.served += len(block)
                writer.write(block)
                await writer.drain()
        except _ResetError:
            await _arrived(writer)
            raise
        await writer.drain()
        return until_closed or headers.get("connection", "").lower() == "close"

    async def _answer_instead(self, request: Request, fault: Answer, headers: Mapping[str, str]) -> None:
        writer = self._client[1]
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async for _ in _body(self._client[0], headers, None, None):
            pass
        text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>by the proxy</Message></Error>"
        body = b"" if request.method == "HEAD" else text.encode()
        head = f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        request.status, request.served = fault.status, len(body)

    def reset(self) -> None:
        """Break both connections the hard way: the other side finds them reset, not ended."""
        for _, writer in (self._client, *([self._server] if self._server else [])):
            found: socket.socket | None = writer.get_extra_info("socket")
            if found is not None and found.fileno() >= 0:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def close(self) -> None:
        self._client[1].close()
        if self._server is not None:
            self._server[1].close()


async def _body(
    reader: asyncio.StreamReader,
    headers: Mapping[str, str],
    fault: Fault | None,
    cut: int | None,
    *,
    until_closed: bool = False,
) -> AsyncIterator[bytes]:
    """The body's blocks as they arrive, framing of chunks included; _ResetError after `cut` bytes."""
    pace = _Pace(fault.bytes_per_second) if isinstance(fault, Slow) else None
    most = _SLOW_BLOCK if pace else _BLOCK
    given = 0
    async for block in body_blocks(reader, headers, most, until_closed=until_closed):
        if cut is not None and given + len(block) >= cut:
            yield block[: cut - given]
            raise _ResetError
        given += len(block)
        if pace is not None:
            await pace.wait(len(block))
        yield block
    if cut is not None:
        raise _ResetError


class _Pace:
    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._due = time.monotonic()

    async def wait(self, nbytes: int) -> None:
        self._due += nbytes / self._rate
        await asyncio.sleep(max(0.0, self._due - time.monotonic()))


async def _arrived(writer: asyncio.StreamWriter) -> None:
    """Wait until the other side's kernel has all that was written: a reset throws away what is still on its way."""
    found: socket.socket = writer.get_extra_info("socket")
    for _ in range(100):
        if not struct.unpack("i", fcntl.ioctl(found.fileno(), termios.TIOCOUTQ, bytes(4)))[0]:
            return
        await asyncio.sleep(0.01)


@contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    """A proxy in front of the server at `url`, for the length of a block."""
    proxy = Proxy(url)
    try:
        yield proxy
    finally:
        proxy.stop()
