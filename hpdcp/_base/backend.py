"""The one byte-store contract: what hpdcp asks of a place that holds files.

A backend is opened once per checkpoint, used from several threads of one process at a time, and closed. It is never
sent to another process. `backends/README.md` shows how to write one, and `hpdcp.testing.BackendContract` is a pytest
class that checks one.
"""

from __future__ import annotations

import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import TracebackType
from typing import ClassVar, Final, Self

from hpdcp._base.errors import InvalidArgumentError, KeyExistsError, KeyNotFoundError, KeyTruncatedError, StorageError

TEMPORARY_PREFIX: Final = ".hpdcp-tmp-"
"""File names that start so are a backend's own while it writes: never a key, never listed."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `offset` to `offset + length` of a key."""

    offset: int
    length: int

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Fetch:
    """One request for bytes of a key, and where they go."""

    range: ByteRange
    parts: tuple[tuple[int, memoryview], ...]
    """(offset within the range, buffer to fill from there on); together they may leave bytes of the range unused."""

    @property
    def target(self) -> memoryview | None:
        """The one buffer that takes the whole range; None where the bytes go through memory of the request's own."""
        (_, view), *others = self.parts
        return view if not others and len(view) == self.range.length else None

    def scatter(self, data: memoryview) -> None:
        """Copy `data`, the bytes of the whole range, to where they go."""
        for start, view in self.parts:
            view[:] = data[start : start + len(view)]


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

    coalesce_gap: int = 1 << 20
    """Bytes between two ranges up to which reading the gap as well is faster than a second request."""

    max_read_bytes: int = 16 << 20
    """Bytes after which a coalesced range stops growing: larger ones are not faster here."""

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

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove the keys, durably; one that is not there is fine. After a failure the others are removed all the same.

        The folders of a removed key go as well when that leaves them empty; the root stays.
        """

    def remove_leftovers(self, *, silent_for: float, belongs: Callable[[str], bool]) -> None:
        """Remove what writers that were killed have left under the root: temporary files, uploads that never ended.

        Only what was not touched for `silent_for` seconds by the store's clock, since its writer may live still; and,
        unless it bears the backend's own mark, only what was to become a key that `belongs` accepts. Keys stay as they
        are. Nothing happens where nothing can be left.
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


def without_password(url: str) -> str:
    """`url` as messages may show it.

    >>> without_password("ftp://me:secret@host/run"), without_password("s3://bucket/a:b@c")
    ('ftp://me:***@host/run', 's3://bucket/a:b@c')
    """
    return _PASSWORD.sub(r"\1***\2", url)


_PASSWORD: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^/:@]*:)[^/]*(@)")


def spare_cores() -> int:
    """Cores this process may keep busy: those it may run on, shared with the ranks torchrun started beside it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise InvalidArgumentError(f"LOCAL_WORLD_SIZE is {text!r}; expected the number of ranks on this host.")
    return max(1, len(os.sched_getaffinity(0)) // int(text))


def checked_key(key: str) -> str:
    """`key`, if it names something under the root on every store; else InvalidArgumentError.

    Refused: an absolute path, an empty component, `.` and `..`, NUL, what is not UTF-8, and `TEMPORARY_PREFIX`.

    >>> checked_key("layers/0 [a].safetensors")
    'layers/0 [a].safetensors'
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        problem = "has an empty, '.' or '..' component"
    elif "\0" in key:
        problem = "holds a NUL"
    elif parts[-1].startswith(TEMPORARY_PREFIX):
        problem = f"starts with {TEMPORARY_PREFIX!r}, which marks files that are being written"
    elif not _is_utf8(key):
        problem = "holds a lone surrogate"
    else:
        return key
    raise InvalidArgumentError(f"key {key!r} {problem}: expected a relative path under the checkpoint's root.")


def can_be_key(name: str) -> bool:
    """Whether `checked_key` lets it pass: what else a store lists is not a key."""
    try:
        checked_key(name)
    except InvalidArgumentError:
        return False
    return True


def checked_buffers(key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> list[memoryview]:
    """The buffers of `into` as writable bytes, one per range and as long; else InvalidArgumentError."""
    if len(ranges) != len(into):
        raise InvalidArgumentError(f"key {key!r}: {len(ranges)} ranges, but {len(into)} buffers to read them into.")
    for range_, buffer in zip(ranges, into, strict=True):
        if range_.offset < 0 or range_.length != buffer.nbytes:
            raise InvalidArgumentError(
                f"key {key!r}: {range_} is to be read into a buffer of {buffer.nbytes} bytes; "
                "expected a buffer as long as the range, and an offset from 0."
            )
        if buffer.readonly:
            raise InvalidArgumentError(f"key {key!r}: the buffer for {range_} is read-only.")
    return [as_bytes(buffer) for buffer in into]


def as_bytes(buffer: memoryview) -> memoryview:
    """The same memory as a one-dimensional view of bytes; InvalidArgumentError unless it is C-contiguous."""
    if buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
        return buffer
    if not buffer.c_contiguous:
        raise InvalidArgumentError("a buffer to read into or to write from is not C-contiguous.")
    # cast() refuses shapes with a zero in them.
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())


def check_empty(backend: Backend, key: str, ranges: Sequence[ByteRange]) -> None:
    """Raise where the key is missing, or ends before an empty range of it, for which no request is made."""
    empty = [range_ for range_ in ranges if not range_.length]
    if not empty and ranges:
        return
    size = backend.size(key)
    for range_ in empty:
        if range_.stop > size:
            raise truncated(key, backend.url, range_, size)


_SMALL_GAP: Final = 32 << 10
"""Bytes that no request is worth saving: a store across a network sends them in the time it takes to answer."""
_MOST_WASTE: Final = 10
"""Wanted bytes for each byte of larger gaps: a reader of one eighth of every tensor must not read half of them."""


def fetches(ranges: Sequence[ByteRange], into: Sequence[memoryview], *, gap: int, most_bytes: int) -> list[Fetch]:
    """The requests that fill `into` (as `checked_buffers` gives them) from a key, in the order of the key.

    Ranges that overlap, touch or lie at most `gap` bytes apart share a request of up to `most_bytes`, as long as the
    gaps are small or a tenth of what is wanted. A range longer than `most_bytes` becomes several requests of about
    one length.

    >>> target = memoryview(bytearray(30))
    >>> near = fetches([ByteRange(0, 10), ByteRange(12, 20)], [target[:10], target[10:]], gap=2, most_bytes=64)
    >>> [fetch.range for fetch in near]
    [ByteRange(offset=0, length=32)]
    """
    pieces: list[tuple[int, memoryview]] = []
    for range_, view in zip(ranges, into, strict=True):
        count = -(-range_.length // most_bytes)
        step = -(-range_.length // count) if count else 0
        pieces += [(range_.offset + at, view[at : at + step]) for at in range(0, range_.length, step or 1)]
    pieces.sort(key=itemgetter(0))
    found: list[Fetch] = []
    parts: list[tuple[int, memoryview]] = []
    start = stop = wanted = wasted = 0
    for offset, view in pieces:
        hole = max(0, offset - stop)
        end = max(stop, offset + len(view))
        near = hole <= _SMALL_GAP or (wasted + hole) * _MOST_WASTE <= wanted + len(view)
        if parts and (hole > gap or end - start > most_bytes or not near):
            found.append(Fetch(ByteRange(start, stop - start), tuple(parts)))
            parts = []
        if not parts:
            start, end, hole, wanted, wasted = offset, offset + len(view), 0, 0, 0
            stop = offset
        parts.append((offset - start, view))
        wanted += max(0, end - max(stop, offset))
        wasted += hole
        stop = end
    if parts:
        found.append(Fetch(ByteRange(start, stop - start), tuple(parts)))
    return found


def truncated(key: str, url: str, range_: ByteRange, size: int) -> KeyTruncatedError:
    """The error of a range that ends after the key's `size` bytes."""
    return KeyTruncatedError(
        f"{key!r} in {url} is {size} bytes long, but bytes {range_.offset} to {range_.stop} were wanted: it was cut "
        "off or replaced after it was written. Load another checkpoint."
    )


_ADVICE: Final = {
    errno.ENOSPC: "The file system is full: free space there, or save elsewhere.",
    errno.EDQUOT: "The disk quota is used up: free space, or ask for a larger quota.",
    errno.EFBIG: "The file is larger than the file system or the process's limit (ulimit -f) allows.",
    errno.EROFS: "The file system is mounted read-only: save elsewhere, or mount it for writing.",
    errno.EACCES: "This user has no permission for it: change the permissions, or choose another place.",
    errno.EPERM: "The system does not permit it: check permissions, ownership and file attributes.",
    errno.ENOTDIR: "A component of the path is a file, not a folder: choose another place.",
    errno.EISDIR: "A folder is there where a file was expected.",
    errno.ENAMETOOLONG: "The name is longer than the file system allows.",
    errno.EMFILE: "This process has too many open files: raise its limit (ulimit -n).",
    errno.ENFILE: "The machine has too many open files.",
    errno.EIO: "The device reports an I/O error: look at the system's log before trusting this storage again.",
    errno.ESTALE: "The server no longer knows the file: it was removed, or the export was replaced.",
}


def storage_error(error: OSError, *, doing: str, url: str, key: str | None = None) -> StorageError:
    """`error` as a StorageError (or its KeyNotFoundError, KeyExistsError) that names what was being done, and where.

    `doing` is a verb ("write"); the message says what to do about the causes that users meet. `errno` is kept.
    """
    if isinstance(error, StorageError):
        return error
    number = error.errno
    kind: type[StorageError] = StorageError
    if number == errno.ENOENT and key is not None:
        kind = KeyNotFoundError
    elif number == errno.EEXIST and key is not None:
        kind = KeyExistsError
    what = url if key is None else f"{key!r} in {url}"
    reason = os.strerror(number) if number is not None else str(error) or type(error).__name__
    advice = _ADVICE.get(number, "") if number is not None else ""
    translated = kind(f"cannot {doing} {what}: {reason}. {advice}".rstrip())
    translated.errno = number
    return translated


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
