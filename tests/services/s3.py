"""A real S3 server (SeaweedFS) on this machine's loopback, for as long as the program that started it lives.

    python tests/services/s3.py [--memory] [-- COMMAND ARGUMENT...]

With a command: runs it with the server's settings in its environment and ends with its status. Without: prints the
settings as `export` lines and serves until interrupted. Objects lie in a temporary folder (`--memory`: of
/dev/shm) that is removed at the end.

The server checks signatures and checksums as AWS does. It takes up to 0.9 GB of memory; `GOMEMLIMIT` holds it there.
It runs under a keeper, a process of its own that ends it and removes its data however its parent ended.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

ACCESS_KEY: Final = "hpdcptest"
SECRET_KEY: Final = "hpdcptestsecret"
REGION: Final = "us-east-1"
BUCKET: Final = "hpdcp-test"

_IDENTITIES: Final = {
    (ACCESS_KEY, SECRET_KEY): ["Admin", "Read", "Write", "List", "Tagging"],
    ("hpdcpreader", "hpdcpreadersecret"): ["Read", "List"],
    ("hpdcpstranger", "hpdcpstrangersecret"): ["Read:another-bucket"],
}
READER_KEYS: Final = ("hpdcpreader", "hpdcpreadersecret")
"""Of someone who may read and list, but not write."""
STRANGER_KEYS: Final = ("hpdcpstranger", "hpdcpstrangersecret")
"""Of someone who may do nothing in the bucket."""

_READY_SECONDS: Final = 60
_ATTEMPTS: Final = 4
"""Another program may take a port between its choice and its use."""
_PR_SET_PDEATHSIG: Final = 1


class ServiceError(Exception):
    """The server cannot be started; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a started server answers."""

    url: str
    https_url: str | None
    """The same objects over TLS; None where the program openssl is missing."""
    ca: str | None
    """File with the certificate that `https_url` is trusted by."""


class S3Service:
    """A running server, and its keeper; `stop` is idempotent and nothing is left after it."""

    def __init__(self, *, memory: bool = False) -> None:
        arguments = [sys.executable, str(Path(__file__).resolve()), "--keeper", str(os.getpid())]
        self._keeper = subprocess.Popen(
            [*arguments, *(["--memory"] if memory else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.address = Address(**self._answer())
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """End the server by SIGKILL; its data stays."""
        self._tell("kill")

    def start(self) -> None:
        """Start it again after `kill`, on the same ports and data; returns when it answers."""
        self._tell("start")

    def stop(self) -> None:
        """End the server and remove its data."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.wait(timeout=30)
        self._keeper.stdout.close()

    def _tell(self, command: str) -> None:
        assert self._keeper.stdin is not None
        print(command, file=self._keeper.stdin, flush=True)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            raise ServiceError("the process that keeps the S3 server has ended; its messages are above.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ServiceError(answer["error"])
        return answer


def settings(address: Address) -> dict[str, str]:
    """Environment variables by which SDKs find the server, and by which the tests of a process started with them do."""
    found = {
        "AWS_ENDPOINT_URL": address.url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        # What the developer keeps for the real AWS has no say.
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "HPDCP_TEST_S3_URL": address.url,
        "HPDCP_TEST_S3_BUCKET": BUCKET,
    }
    if address.https_url is not None and address.ca is not None:
        found |= {"HPDCP_TEST_S3_HTTPS_URL": address.https_url, "HPDCP_TEST_S3_CA": address.ca}
    return found


def address_from_environment(environment: Mapping[str, str] = os.environ) -> Address | None:
    """A server that is running already, as `settings` announced it; None when none was."""
    url = environment.get("HPDCP_TEST_S3_URL")
    if not url:
        return None
    return Address(url, environment.get("HPDCP_TEST_S3_HTTPS_URL"), environment.get("HPDCP_TEST_S3_CA"))


@contextmanager
def running(*, memory: bool = False) -> Iterator[S3Service]:
    """A server for the length of a block."""
    service = S3Service(memory=memory)
    try:
        yield service
    finally:
        service.stop()


def _program() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise ServiceError("the S3 server (SeaweedFS, `weed`) is not installed. Install it: make services")
    return found


class _Keeper:
    """The process between the server and whoever wants it; reads commands from stdin, one a line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "data"
        self._data.mkdir()
        self._log = folder / "log"
        self._server: subprocess.Popen[bytes] | None = None
        self._ca = self._make_certificate()

    def first_start(self) -> Address:
        for attempt in range(_ATTEMPTS):
            self._choose_ports()
            try:
                self.start()
            except _PortTakenError:
                if attempt == _ATTEMPTS - 1:
                    raise
                self.kill()
                continue
            break
        https = f"https://127.0.0.1:{self._ports['s3.port.https']}" if self._ca else None
        return Address(f"http://127.0.0.1:{self._ports['s3.port']}", https, str(self._ca) if self._ca else None)

    def start(self) -> None:
        if self._server is not None:
            raise ServiceError("the S3 server is running already; kill it first.")
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                [_program(), *self._options()],
                cwd=self._folder,
                env=os.environ | {"GOMEMLIMIT": os.environ.get("HPDCP_TEST_S3_GOMEMLIMIT", "600MiB")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # The keeper has one thread, so running Python between fork and exec is safe here.
                preexec_fn=_end_with_parent(signal.SIGKILL),
            )
        self._wait_until_ready()

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def _options(self) -> list[str]:
        identities = [
            {
                "name": access,
                "credentials": [{"accessKey": access, "secretKey": secret}],
                "actions": actions,
            }
            for (access, secret), actions in _IDENTITIES.items()
        ]
        (self._folder / "identities.json").write_text(json.dumps({"identities": identities}))
        options: dict[str, object] = {
            "dir": self._data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "bucket": BUCKET,
            "s3.config": self._folder / "identities.json",
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self._folder / "s3.sock",
            "filer.localSocket": self._folder / "filer.sock",
            "webdav": "false",
            "admin.ui": "false",
            "master.telemetry": "false",
            **self._ports,
        }
        if self._ca is None:
            del options["s3.port.https"]
        else:
            options |= {"s3.cert.file": self._ca, "s3.key.file": self._ca.with_name("key.pem")}
        return ["mini", *(f"-{name}={value}" for name, value in options.items())]

    def _choose_ports(self) -> None:
        servers = ("s3", "filer", "master", "volume", "admin")
        names = [f"{server}.port{kind}" for server in servers for kind in ("", ".grpc")] + ["s3.port.https"]
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in names]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            self._ports = {name: probe.getsockname()[1] for name, probe in zip(names, probes, strict=True)}

    def _make_certificate(self) -> Path | None:
        if shutil.which("openssl") is None:
            return None
        certificate = self._folder / "ca.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=localhost"]
        # Not an authority, which openssl makes it by default: rustls, inside obstore, takes none for a server.
        names = [
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ]
        files = ["-keyout", str(certificate.with_name("key.pem")), "-out", str(certificate)]
        made = subprocess.run([*command, *names, *files], capture_output=True, text=True, check=False)
        if made.returncode:
            raise ServiceError(f"openssl made no certificate for the S3 server:\n{made.stderr}")
        return certificate

    def _wait_until_ready(self) -> None:
        assert self._server is not None
        deadline = time.monotonic() + _READY_SECONDS
        while (trouble := _trouble(f"http://127.0.0.1:{self._ports['s3.port']}")) is not None:
            if self._server.poll() is not None:
                log = self._log.read_text(errors="replace")[-3000:]
                kind = _PortTakenError if "address already in use" in log or "is not available" in log else ServiceError
                raise kind(f"the S3 server ended with status {self._server.returncode}; its log ends with:\n{log}")
            if time.monotonic() > deadline:
                log = self._log.read_text(errors="replace")[-3000:]
                raise ServiceError(
                    f"the S3 server did not answer within {_READY_SECONDS} s: {trouble}; its log ends with:\n{log}"
                )
            time.sleep(0.1)


class _PortTakenError(ServiceError):
    """Another program took one of the ports."""


def _trouble(url: str) -> str | None:
    """What keeps a signed write from succeeding; None when it did."""
    # Beside the imports above it would slow down every program that only wants the constants.
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=10),
    )
    try:
        client.put_object(Bucket=BUCKET, Key=".ready", Body=b"signed")
        client.delete_object(Bucket=BUCKET, Key=".ready")
    except (BotoCoreError, ClientError) as error:
        return str(error)
    finally:
        client.close()
    return None


def _end_with_parent(number: signal.Signals) -> Any:
    """A function that has the system send this process the signal when its parent is gone, however that ended."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _keep(parent: int, *, memory: bool) -> None:
    """Run as the keeper until stdin ends, a signal arrives or the parent is gone."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    # An interrupt at the keyboard reaches the whole foreground group; the tests still tidy up with the server's help.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent(signal.SIGTERM)()
    if os.getppid() != parent:
        return
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    with tempfile.TemporaryDirectory(prefix="hpdcp-s3-", dir="/dev/shm" if memory else None) as folder:
        keeper = _Keeper(Path(folder))
        try:
            _answer_commands(keeper)
        finally:
            keeper.kill()


def _answer_commands(keeper: _Keeper) -> None:
    commands = {"kill": keeper.kill, "start": keeper.start}
    try:
        address = keeper.first_start()
        _say(url=address.url, https_url=address.https_url, ca=address.ca)
        for line in sys.stdin:
            commands[line.strip()]()
            _say()
    except ServiceError as error:
        _say(error=str(error))


def _say(**answer: object) -> None:
    # Whoever asked may be gone; then stdin has ended as well, and the keeper with it.
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(answer), flush=True)


def _serve(command: Sequence[str], *, memory: bool) -> int:
    with running(memory=memory) as service:
        found = settings(service.address)
        if command:
            return subprocess.run(command, env=os.environ | found, check=False).returncode
        for name, value in found.items():
            print(f"export {name}={shlex.quote(value)}")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            select.select([], [], [])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true", help="keep objects in memory (/dev/shm)")
    parser.add_argument("--keeper", type=int, metavar="PARENT", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="what to run beside the server")
    options = parser.parse_args()
    if options.keeper is not None:
        _keep(options.keeper, memory=options.memory)
        return 0
    try:
        return _serve(options.command, memory=options.memory)
    except ServiceError as error:
        print(f"s3.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
