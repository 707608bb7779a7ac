"""The proxy passes requests on as they are, counts them, and breaks those that it is told to break."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from tests.support.proxy import (
    Answer,
    CutAnswer,
    CutRequest,
    Do,
    LoseAnswer,
    Proxy,
    Refuse,
    Rule,
    Slow,
    Stall,
    proxied,
)
from tests.support.s3_wire import operation_of

DATA = bytes(range(256)) * 4096
BROKEN = (ConnectionError, http.client.IncompleteRead, http.client.RemoteDisconnected)


class Store(BaseHTTPRequestHandler):
    """Keeps what is PUT and gives it back."""

    protocol_version = "HTTP/1.1"
    held: ClassVar[dict[str, bytes]] = {}
    cut_short: ClassVar[list[int]] = []
    hosts: ClassVar[list[str | None]] = []

    def do_PUT(self) -> None:
        self.hosts.append(self.headers["Host"])
        size = int(self.headers["Content-Length"])
        data = b""
        try:
            while len(data) < size and (block := self.rfile.read1(min(65536, size - len(data)))):
                data += block
        except ConnectionResetError:
            pass
        if len(data) < size:
            self.cut_short.append(len(data))
            self.close_connection = True
            return
        self.held[self.path] = data
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path.endswith("chunked"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(DATA), 100_000):
                block = DATA[start : start + 100_000]
                self.wfile.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()
        try:
            self.wfile.write(DATA)
        except ConnectionError:
            self.close_connection = True

    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are what these tests are about."""


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    for kept in (Store.held, Store.cut_short, Store.hosts):
        kept.clear()
    with Server(("127.0.0.1", 0), Store) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with proxied(f"http://127.0.0.1:{server.server_address[1]}") as proxy:
                yield proxy
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=10)
    yield connection
    connection.close()


def put(client: http.client.HTTPConnection, path: str = "/bucket/key") -> int:
    client.request("PUT", path, body=DATA, headers={"Host": "signed.example"})
    answer = client.getresponse()
    answer.read()
    return answer.status


def get(client: http.client.HTTPConnection, path: str = "/bucket/key") -> bytes:
    client.request("GET", path)
    return client.getresponse().read()


def test_requests_of_one_connection_pass_unchanged_and_are_counted(
    proxy: Proxy, client: http.client.HTTPConnection
) -> None:
    assert put(client) == 200
    assert get(client) == DATA
    assert get(client, "/bucket/chunked") == DATA
    assert Store.held == {"/bucket/key": DATA}
    assert Store.hosts == ["signed.example"]
    assert [(r.operation, r.status) for r in proxy.requests] == [
        ("PutObject", 200),
        ("GetObject", 200),
        ("GetObject", 200),
    ]
    assert proxy.received("PutObject") == len(DATA)
    assert proxy.served("GetObject", "/key$") == len(DATA)
    assert proxy.served("PutObject") == 0


def test_a_request_is_cut_after_so_many_bytes_on_both_sides(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    proxy.add(Rule(CutRequest(after=100_000), "PutObject"))
    with pytest.raises(BROKEN):
        put(client)
    wait_for(lambda: Store.cut_short)
    assert Store.cut_short == [100_000]
    assert Store.held == {}
    client.close()
    assert put(client) == 200


def test_an_answer_is_cut_after_so_many_bytes(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    proxy.add(Rule(CutAnswer(after=100_000), "GetObject"))
    client.request("GET", "/bucket/key")
    answer = client.getresponse()
    assert answer.read(100_000) == DATA[:100_000]
    with pytest.raises(BROKEN):
        answer.read(1)
    client.close()
    assert get(client) == DATA
    assert [request.served for request in proxy.requests] == [100_000, len(DATA)]


def test_a_lost_answer_is_one_of_a_request_that_went_through(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    proxy.add(Rule(LoseAnswer(), "PutObject"))
    with pytest.raises(BROKEN):
        put(client)
    assert Store.held == {"/bucket/key": DATA}
    assert proxy.requests[0].status == 200


def test_a_status_is_answered_in_the_servers_place(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    rule = proxy.add(Rule(Answer(503, "SlowDown"), times=2))
    assert [put(client), put(client), put(client)] == [503, 503, 200]
    assert rule.hits == 2
    proxy.add(Rule(Answer(500), line="^GET"))
    assert b"<Code>InternalError</Code>" in get(client)


def test_a_rule_takes_the_requests_it_names_and_counts_to_its_turn(
    proxy: Proxy, client: http.client.HTTPConnection
) -> None:
    proxy.add(Rule(Answer(500), "PutObject", line=r"/odd key\?x=1", skip=1))
    paths = ["/bucket/odd%20key?x=1", "/bucket/other", "/bucket/odd%20key?x=1", "/bucket/odd%20key?x=1"]
    assert [put(client, path) for path in paths] == [200, 200, 500, 200]


def test_a_stalled_answer_is_waited_for_in_vain(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    proxy.add(Rule(Stall(60), "GetObject"))
    proxy.add(Rule(Stall(0.01), "PutObject"))
    assert put(client) == 200
    assert client.sock is not None
    client.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        get(client)
    client.close()
    assert get(client) == DATA


def test_a_slow_answer_comes_bit_by_bit(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    proxy.add(Rule(Slow(4 * len(DATA))))
    client.request("GET", "/bucket/key")
    answer = client.getresponse()
    begin = answer.read(len(DATA) // 4)
    assert proxy.requests[0].served < len(DATA)
    assert begin + answer.read() == DATA


def test_connections_are_refused_for_a_while(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    proxy.add(Rule(Refuse(0.5)))
    with pytest.raises(BROKEN):
        get(client)
    client.close()
    with pytest.raises(ConnectionRefusedError):
        get(client)
    client.close()
    wait_for(lambda: answers(client))


def test_a_closed_door_resets_who_is_inside_and_opens_at_the_same_place(
    proxy: Proxy, client: http.client.HTTPConnection
) -> None:
    assert get(client) == DATA
    url = proxy.url
    proxy.close_door()
    with pytest.raises(BROKEN):
        get(client)
    proxy.open_door()
    client.close()
    assert get(client) == DATA
    assert proxy.url == url


def test_something_is_done_before_a_request_passes(proxy: Proxy, client: http.client.HTTPConnection) -> None:
    seen: list[dict[str, bytes]] = []
    proxy.add(Rule(Do(lambda: seen.append(dict(Store.held)))))
    assert put(client) == 200
    assert seen == [{}]


@pytest.mark.parametrize(
    ("request_line", "headers", "operation"),
    [
        ("POST /b/k/k?uploads", {}, "CreateMultipartUpload"),
        ("POST /b/k?uploads=", {}, "CreateMultipartUpload"),
        ("PUT /b/k?partNumber=3&uploadId=x", {}, "UploadPart"),
        ("PUT /b/k?x-id=UploadPart&partNumber=3&uploadId=x", {}, "UploadPart"),
        ("POST /b/k?uploadId=x", {}, "CompleteMultipartUpload"),
        ("DELETE /b/k?uploadId=x", {}, "AbortMultipartUpload"),
        ("GET /b/k?uploadId=x", {}, "ListParts"),
        ("PUT /b/k", {"x-amz-copy-source": "/b/other"}, "CopyObject"),
        ("PUT /b/k?x-id=PutObject", {}, "PutObject"),
        ("HEAD /b/k", {}, "HeadObject"),
        ("DELETE /b/k", {}, "DeleteObject"),
        ("GET /b?list-type=2&prefix=a%2Fb", {}, "ListObjects"),
        ("GET /b/?uploads&prefix=a", {}, "ListMultipartUploads"),
        ("POST /b?delete", {}, "DeleteObjects"),
        ("HEAD /b", {}, "HeadBucket"),
    ],
)
def test_operations_have_the_names_that_s3_gives_them(
    request_line: str, headers: dict[str, str], operation: str
) -> None:
    method, target = request_line.split(" ")
    assert operation_of(method, target, headers) == operation


def answers(client: http.client.HTTPConnection) -> bool:
    try:
        return get(client) == DATA
    except BROKEN:
        client.close()
        return False


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
