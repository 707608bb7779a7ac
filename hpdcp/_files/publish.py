"""Keys that are read and published whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hpdcp._base.backend import Backend, read_or_none
from hpdcp._base.errors import CommitUncertainError, KeyChangedError, StorageError

__all__ = ["doubted", "publish_or_doubt", "read_or_none"]


def publish_or_doubt(backend: Backend, key: str, data: bytes) -> None:
    """Publish `data`; an error means that the old bytes are there and stay, unless it is a CommitUncertainError."""
    with doubted(backend, key, data):
        backend.publish(key, data)


@contextlib.contextmanager
def doubted(backend: Backend, key: str, data: bytes) -> Iterator[None]:
    """A context in which `data` is published: what fails in it and may be done all the same is a CommitUncertainError.

    Any other error means that what was there stays.
    """
    try:
        yield
    except KeyChangedError:
        raise
    except StorageError as error:
        try:
            if read_or_none(backend, key) != data and not error.may_be_done:
                raise
        except StorageError as second:
            if second is error:
                raise
        raise CommitUncertainError(
            f"{backend.url}: publishing {key} failed half-way ({error}). The new checkpoint may be in place and not "
            "yet safe against a power failure, or appear later; none of its files were removed. Save again once the "
            "storage is sound."
        ) from error
