"""One file system of fsspec's as a backend uses it: opened once, in turns where it must be, its errors in words."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from fsspec.dircache import DirCache
from fsspec.spec import AbstractFileSystem

from hpdcp._base.backend import checked_key, without_password
from hpdcp._base.errors import HpdcpError, KeyNotFoundError, NotSupportedError, StorageError
from hpdcp._base.locations import split_scheme
from hpdcp._base.threads import Threads
from hpdcp_backends._generic.stores import ADVICE, SHARED, file_system_class, passwords

_PROBE: Final = "hpdcp-probe"


class Connection:
    """The file system that a URL leads to, and the root under which a backend's keys lie.

    It is made when first used, for this connection alone, and its listings are never cached.
    """

    def __init__(self, url: str, storage_options: Mapping[str, object] | None, *, requests: int) -> None:
        scheme, rest = split_scheme(url)
        self.protocol = scheme or "file"
        address, slash, path = (rest if scheme else os.path.abspath(url)).partition("/")
        path = path.strip("/")
        shown = f"{self.protocol}://{address}{slash if path else ''}{path}" if scheme else f"/{path}"
        self.url = without_password(shown)
        """The root, as messages name it."""
        self._secrets = passwords(address)
        self.kind = file_system_class(self.protocol, self.url)
        # Only the address says how to connect; a path that looks like a query must not.
        connection = f"{self.protocol}://{address}{slash}{quote(path)}"
        self._arguments = {**self.kind._get_kwargs_from_urls(connection), **(storage_options or {})}
        self.root = self._path_within(address, path)
        """What the file system calls the root, without a slash at the end: empty for the root of a disk."""
        parallel = self.kind.async_impl or self.protocol in SHARED
        self._requests = requests if parallel else 1
        self._turn: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext() if parallel else threading.RLock()
        )
        self._opening = threading.Lock()
        self._opened: AbstractFileSystem | None = None

    @property
    def on_disk(self) -> bool:
        """Whether files are this machine's own, so that making them durable is up to us."""
        return self.protocol in ("file", "local")

    def folder(self, under: str, files: AbstractFileSystem) -> str:
        """What the file system calls the folder `under` the root, or the root itself."""
        return self.path(under) if under else self.root or str(files.root_marker)

    def _path_within(self, address: str, path: str) -> str:
        """What the file system calls the root, without a slash at the end."""
        probed = self.kind._strip_protocol(f"{self.protocol}://{address}/{_PROBE}")
        if not isinstance(probed, str) or not probed.endswith(_PROBE):
            raise NotSupportedError(f"{self.url}: {self.protocol}:// names things by other means than paths.")
        literal = quote(path) if self.protocol in ("http", "https") else path
        return (probed.removesuffix(_PROBE) + literal).rstrip("/")

    def path(self, key: str) -> str:
        """What the file system calls the key; InvalidArgumentError as `checked_key`."""
        literal = quote(checked_key(key)) if self.protocol in ("http", "https") else checked_key(key)
        return f"{self.root}/{literal}"

    def _file_system(self) -> AbstractFileSystem:
        with self._opening:
            if self._opened is None:
                opened = self.kind(**self._arguments, skip_instance_cache=True)
                # Not by an argument: SFTP and others hand the ones they do not know to their SDK.
                opened.dircache = DirCache(use_listings_cache=False)
                self._opened = opened
            return self._opened

    @contextlib.contextmanager
    def using(self, doing: str, key: str | None = None) -> Iterator[AbstractFileSystem]:
        """The file system, for one thing; whatever it raises comes out as an error that names what, and where."""
        with self._turn:
            try:
                yield self._file_system()
            except HpdcpError:
                raise
            except Exception as error:
                # SDKs raise errors of many families, not all of them OSErrors.
                raise self._failure(error, doing, key) from error

    def _failure(self, error: Exception, doing: str, key: str | None) -> HpdcpError:
        what = self.url if key is None else f"{key!r} in {self.url}"
        text = " ".join(str(error).split()) or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if isinstance(error, NotImplementedError):
            return NotSupportedError(f"cannot {doing} {what}: {self.kind.__name__} does not implement that ({text}).")
        if isinstance(error, FileNotFoundError) and key is not None and doing == "read":
            return KeyNotFoundError(f"cannot read {what}: it is not there ({text}).")
        advice = next((advice for kind, advice in ADVICE if isinstance(error, kind)), "")
        translated = StorageError(f"cannot {doing} {what}: {type(error).__name__}: {text}. {advice}".rstrip())
        translated.errno = error.errno if isinstance(error, OSError) else None
        return translated

    def close(self) -> None:
        """Let go of the file system; the next use opens another."""
        with self._opening:
            self._opened = None

    def info(self, files: AbstractFileSystem, path: str, key: str) -> Mapping[str, Any]:
        """What the store says of the file now; KeyNotFoundError where a folder is there in its place."""
        files.invalidate_cache(path)
        info: Mapping[str, Any] = files.info(path)
        if info["type"] == "directory":
            raise KeyNotFoundError(f"cannot read {key!r} in {self.url}: a folder of that name is there, and no file.")
        if info["size"] is None:
            raise NotSupportedError(f"cannot read {key!r} in {self.url}: the store does not say how long it is.")
        return info

    def together(self, works: Sequence[Callable[[], None]]) -> None:
        """Do all of them, several at a time; the first failure is raised when nothing runs any more."""
        if self._requests == 1 or len(works) <= 1:
            for work in works:
                work()
            return
        with Threads(min(self._requests, len(works)), thread_name_prefix="hpdcp-fsspec") as pool:
            running = [pool.submit(work) for work in works]
            try:
                for future in running:
                    future.result()
            finally:
                for future in running:
                    future.cancel()
