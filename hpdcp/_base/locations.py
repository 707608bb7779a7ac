"""Paths and URLs as users write them: schemes, folders of this machine, and what fsspec puts before another URL."""

from __future__ import annotations

import os
import re
from typing import Final

from hpdcp._base.backend import without_password
from hpdcp._base.errors import InvalidArgumentError

LOCAL_SCHEMES: Final = frozenset({"file", "local"})

FSSPEC_WRAPPERS: Final = frozenset({
    "async_wrapper", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir", "filecache", "generic",
    "libarchive", "reference", "simplecache", "tar", "zip",
})  # fmt: skip
"""fsspec's schemes that stand for another file system: a cache answers with old bytes, and in an archive nothing is
replaced in one step."""

# Not urlsplit(), which raises for brackets in a bucket's name.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def split_scheme(url: str) -> tuple[str, str]:
    """The scheme in lower case, empty for a path, and what follows it.

    >>> split_scheme("S3://bucket/a"), split_scheme("/folder")
    (('s3', 'bucket/a'), ('', '/folder'))
    """
    found = _SCHEME.match(url)
    return (found[1].lower(), url[found.end() :]) if found else ("", url)


def local_path(location: str) -> str:
    """The absolute path of the folder that a path, or a `file://` URL, names now; `~` and `..` are resolved.

    >>> local_path("file://localhost/runs//a/")
    '/runs/a'

    Raises:
        InvalidArgumentError: a URL of another scheme, or one that names a host or no absolute path; or nothing.
    """
    shown = without_password(location)
    scheme, path = split_scheme(location)
    if scheme and scheme not in LOCAL_SCHEMES:
        raise InvalidArgumentError(f"{shown!r} is not a local folder: expected a path, or file:// and a path.")
    if scheme:
        path = path.removeprefix("localhost") if path.startswith("localhost/") else path
        if not path.startswith(("/", "~")):
            raise InvalidArgumentError(
                f"{shown} names a host, or a relative path: expected file:/// and an absolute path. "
                "A relative path is given without file://."
            )
    if not path or "\0" in path:
        raise InvalidArgumentError(f"{shown!r} names no folder: expected a path, or file:// and a path.")
    path = os.path.expanduser(path)
    if path.startswith("/"):
        path = "/" + path.lstrip("/")  # POSIX keeps two
    # abspath() removes `..` by text alone, which goes astray where the component before it is a symbolic link.
    return os.path.realpath(path) if ".." in path.split("/") else os.path.abspath(path)
