"""A store's failures, as errors that say what was being done, where, and what to do next."""

from __future__ import annotations

import errno
import os
from typing import Final

from hpdcp._base._byte_ranges import ByteRange
from hpdcp._base._secrets import masked_url
from hpdcp._base.errors import KeyExistsError, KeyNotFoundError, KeyTruncatedError, StorageError


def without_password(url: str) -> str:
    """`url` as messages may show it.

    >>> without_password("ftp://me:secret@host/run"), without_password("s3://bucket/a:b@c")
    ('ftp://***@host/run', 's3://bucket/a:b@c')
    """
    return masked_url(url)


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
    errno.EACCES: "This user has no permission for it: change the permissions, or choose another location.",
    errno.EPERM: "The system does not permit it: check permissions, ownership and file attributes.",
    errno.ENOTDIR: "A component of the path is a file, not a folder: choose another location.",
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
