"""What the generic backend must know of the file systems that fsspec serves, and how they tell things."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import unquote

import fsspec
from fsspec.spec import AbstractFileSystem

from hpdcp._base.errors import InvalidArgumentError, NotSupportedError
from hpdcp._base.locations import FSSPEC_WRAPPERS

PUT: Final = frozenset({"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "tos", "tosfs"})
"""Object stores: what is uploaded appears under its name when it is complete, in place of what was there. A rename
would be a copy and a removal."""

RENAME: Final = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs"})
"""Folders and files: a file is written under another name and then renamed over the old one. Those that refuse to
rename over a file (SMB, HDFS) hold each checkpoint in a folder of its own, and say so when one is to be replaced."""

SHARED: Final = frozenset({"memory", "file", "local", "hdfs", "arrow_hdfs"})
"""File systems without asyncio that several threads may use at a time. Others (one FTP connection, paramiko, unknown
ones) are used by one thread at a time."""

ONE_VERSION: Final = frozenset({"memory", "file", "local", "sftp", "ssh"})
"""Where one call that reads a whole file sees one version of it, however large it is."""

RMDIR_KEEPS_FULL: Final = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb"})
"""Where removing a folder that holds something fails. On HDFS it takes all that is in it."""

_VERSION_FIELDS: Final = (
    "size", "ETag", "etag", "generation", "VersionId", "version_id", "md5Hash", "crc32c", "content_md5", "ino",
    "mtime", "LastModified", "last_modified", "modified", "updated", "modify", "modificationTime", "created",
)  # fmt: skip
"""What file systems report of a file that changes when another takes its place."""

_TIME_FIELDS: Final = ("mtime", "LastModified", "last_modified", "modified", "updated", "last_write_time", "created")

_TRIES: Final = 10

ADVICE: Final[tuple[tuple[type[Exception], str], ...]] = (
    (PermissionError, "Check the credentials (storage_options, or what its package reads), and what they permit."),
    (FileNotFoundError, "Is the bucket, share or folder there?"),
    (ConnectionError, "The store could not be reached: check the host, the port and the network."),
    (TimeoutError, "The store did not answer in time: check the host, the port and the network."),
    (TypeError, "Are these the storage_options that its package takes?"),
)


def file_system_class(protocol: str, url: str) -> type[AbstractFileSystem]:
    if protocol in FSSPEC_WRAPPERS:
        raise InvalidArgumentError(
            f"{url}: {protocol}:// stands for another file system (a cache of it would answer with old bytes, an "
            "archive cannot replace a file in one step). Give the URL of the files themselves."
        )
    try:
        found: type[AbstractFileSystem] = fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise InvalidArgumentError(
            f"{url}: fsspec knows no {protocol}://. Install the package that brings it, or correct the URL."
        ) from None
    except ImportError as error:
        raise NotSupportedError(f"{url} needs a package that is not installed: {error}") from error
    return found


def passwords(address: str) -> list[str]:
    """The password of `user:password@host`, as it is written and as it is meant."""
    _, colon, written = address.rpartition("@")[0].partition(":")
    return [written, unquote(written)] if colon and written else []


def make_folder(files: AbstractFileSystem, folder: str) -> None:
    """Make it and those above it, while other ranks do the same."""
    for turn in range(_TRIES):
        try:
            files.makedirs(folder, exist_ok=True)
            return
        except Exception:
            if files.isdir(folder):
                return
            if turn == _TRIES - 1:
                raise
            time.sleep(0.01)


def version_of(info: Mapping[str, Any]) -> list[str]:
    return [repr(info.get(field)) for field in _VERSION_FIELDS]


def modified_at(info: Mapping[str, Any]) -> float:
    """Seconds since the epoch; now, where the store tells nothing: a file of unknown age is never taken for an old one.

    >>> modified_at({"LastModified": datetime(1970, 1, 2, tzinfo=UTC)}), modified_at({"modify": "19700101000001"})
    (86400.0, 1.0)
    """
    for field in _TIME_FIELDS:
        value = info.get(field)
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if "modificationTime" in info:  # HDFS over HTTP: milliseconds
        return float(info["modificationTime"]) / 1000
    if "modify" in info:  # FTP
        stamp = str(info["modify"]).partition(".")[0]
        return datetime.strptime(stamp, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()
    return time.time()
