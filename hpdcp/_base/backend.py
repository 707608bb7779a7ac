"""The one byte-store contract: what hpdcp asks of a store that holds files.

A backend is opened once per checkpoint, used from several threads of one process at a time, and closed. It is never
sent to another process. `backends/README.md` shows how to write one, and `hpdcp.testing.BackendContract` is a pytest
class that checks one. What backends check and count alike is offered here as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self

from hpdcp._base._byte_ranges import ByteRange, Fetch, as_bytes, checked_buffers, fetches, memory_view
from hpdcp._base._keys import TEMPORARY_PREFIX, can_be_key, checked_key
from hpdcp._base._secrets import remember as remember_secrets
from hpdcp._base._storage_errors import storage_error, truncated, without_password
from hpdcp._base._temporary_names import is_left_over, temporary_name
from hpdcp._base.errors import KeyChangedError, KeyNotFoundError
from hpdcp._base.threads import spare_cores

__all__ = [
    "TEMPORARY_PREFIX",
    "Backend",
    "ByteRange",
    "Fetch",
    "KeyInfo",
    "as_bytes",
    "can_be_key",
    "check_empty",
    "check_unchanged",
    "checked_buffers",
    "checked_key",
    "fetches",
    "is_left_over",
    "memory_view",
    "read_or_none",
    "spare_cores",
    "storage_error",
    "temporary_name",
    "truncated",
    "remember_secrets",
    "without_password",
]


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key of a listing."""

    key: str
    size: int
    modified: float
    """Seconds since the epoch, by the store's clock."""


class Backend(ABC):
    """Keys to bytes under one root. Knows nothing of tensors, plans or ranks.

    A key is a relative path with `/` between its components (`checked_key` says which are refused). Every failure of
    the store is a StorageError that names the key and the URL; what is wrong with the call itself is an
    InvalidArgumentError. All methods may be called from several threads at once.
    """

    name: ClassVar[str]
    """The name it is registered under."""

    remote: ClassVar[bool] = True
    """Whether every rank that reads pays the network."""

    shares_page_cache: ClassVar[bool] = False
    """Whether ranks of one host that read the same bytes fetch them once, since the operating system keeps them."""

    url: str
    """The root, absolute, as messages and metadata name it; without a password."""

    process_local: bool = False
    """Whether what is stored dies with this process and no other one sees it: not other ranks, not the background
    worker. What needs either is then refused."""

    conditional_create: bool = False
    """Whether `write(..., exclusive=True)` works: of any number of writers, exactly one gets the key."""

    @property
    def conditional_publish(self) -> bool:
        """Whether `publish_if` compares and stores in one step: of any number of callers that expect the same, exactly
        one succeeds. What cannot be known before it was tried may turn False later."""
        return False

    coalesce_gap: int = 1 << 20
    """Bytes between two ranges up to which reading the gap as well is faster than a second request."""

    max_read_bytes: int = 16 << 20
    """Bytes after which a coalesced range stops growing: larger ones are not faster here."""

    max_concurrent_reads: int = 4
    """Reads that a rank has in flight at a time while it broadcasts what it has read; each holds a batch in memory. As
    many as hide the way to the store; one where the bytes are on this machine."""

    write_window: int | None = None
    """Bytes of earlier buffers that `write` may still be using when it asks for the next one; None: all of them."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the root exist, durably; nothing happens where it does, or where the store needs none."""

    @abstractmethod
    def list_keys(self, under: str = "", *, recursive: bool = False) -> list[KeyInfo]:
        """The keys directly under the folder `under` (the root by default), sorted by key; never from a cache.

        Folders themselves are not keys; they are entered when `recursive`. What other processes finished writing
        before the call is in it. A missing `under` has no keys. A missing root is a CheckpointNotFoundError where
        the store can tell it from an empty one.
        """

    def list_folders(self) -> list[str]:
        """The folders directly under the root, sorted; for advice, not for decisions. By default from all keys below.

        Errors as `list_keys`.
        """
        return sorted({info.key.partition("/")[0] for info in self.list_keys(recursive=True) if "/" in info.key})

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes the key holds now. KeyNotFoundError when there is none."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """All bytes of the key, of one version of it, as they are now. KeyNotFoundError when there is none."""

    @abstractmethod
    def read_ranges(self, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """Fill each buffer of `into` (writable, C-contiguous, of the range's length) with its range of the key.

        All ranges come from one version of the key, fetched concurrently where that is faster, in any order; they may
        overlap and be empty. Every buffer is full on return. On an error (KeyNotFoundError, KeyTruncatedError when
        the key is shorter than a range asks, any StorageError) their contents are undefined.
        """

    def map_range(self, key: str, range_: ByteRange) -> memoryview | None:
        """The range as a read-only view that copies nothing, None where the store cannot.

        The view stays good after the key is replaced or deleted and after `close`; its bytes are fetched when touched.
        Errors as `read_ranges`.
        """
        del range_
        checked_key(key)
        return None

    def map_private(self, key: str) -> memoryview | None:
        """All bytes of the key, writable, without a copy: what is written stays in this process, and the key as it is.

        None where the store cannot. Otherwise as `map_range`.
        """
        checked_key(key)
        return None

    @abstractmethod
    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        """Store `size` bytes, the buffers one after the other, under the key; durable on return.

        `buffers` (each C-contiguous) is iterated lazily, once, in order and in the calling thread. A buffer must stay
        unchanged until `write_window` bytes have been handed out after it, or `write` has returned: that is all the
        memory a producer needs.

        `exclusive=True` creates the key: KeyExistsError, with nothing changed and no buffer asked for, when it is
        there; NotSupportedError unless `conditional_create`. `exclusive=False` replaces it in one step: the old bytes
        stay readable until all the new ones are stored.

        Any failure (of the store, of the iterator, or a total other than `size`, an InvalidArgumentError) removes
        what was written and leaves a key that was there as it was.
        """

    @abstractmethod
    def publish(self, key: str, data: bytes) -> None:
        """Store small `data` under the key in one step, replacing what was there; durable on return.

        Whoever reads the key, at any moment and whatever crashes, finds the old bytes or the new ones.
        """

    def publish_if(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        """As `publish`, while the key holds the bytes `expected`; None: while it is not there.

        KeyChangedError, with nothing changed, where it is otherwise. Unless `conditional_publish`, what others publish
        between the comparison and the end of the call is lost.
        """
        check_unchanged(self, key, read_or_none(self, key), expected)
        self.publish(key, data)

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove the keys, durably; one that is not there is fine. After a failure the others are removed all the same.

        Nothing outside the root is removed: a folder below it that is a link to another one counts as not there.

        The folders of a removed key go as well when that leaves them empty; the root stays.
        """

    def remove_leftovers(self, *, silent_for: float, belongs: Callable[[str], bool]) -> None:
        """Remove what writers that were killed have left under the root: temporary files, uploads that never ended.

        At once where the writer is known to have ended; else only what was not touched for `silent_for` seconds by the
        store's clock, since it may live still. And, unless it bears the backend's own mark, only what was to become a
        key that `belongs` accepts. Keys stay as they are. Nothing happens where nothing can be left.
        """
        del silent_for, belongs

    def close(self) -> None:
        """Let go of files, connections and threads; views handed out by `map_range` stay good. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def read_or_none(backend: Backend, key: str) -> bytes | None:
    """The key's bytes; None when it is not there."""
    try:
        return backend.read(key)
    except KeyNotFoundError:
        return None


def check_unchanged(backend: Backend, key: str, found: bytes | None, expected: bytes | None) -> None:
    """Raise a KeyChangedError unless the key was found to hold what is expected; None stands for no such key."""
    if found != expected:
        raise KeyChangedError(f"{key!r} in {backend.url} is not what it was: somebody else stored or removed it.")


def check_empty(backend: Backend, key: str, ranges: Sequence[ByteRange]) -> None:
    """Raise where the key is missing, or ends before an empty range of it, for which no request is made."""
    empty = [range_ for range_ in ranges if not range_.length]
    if not empty and ranges:
        return
    size = backend.size(key)
    for range_ in empty:
        if range_.stop > size:
            raise truncated(key, backend.url, range_, size)
