"""Keys that are read and published whole."""

from __future__ import annotations

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CommitUncertainError, KeyNotFoundError, StorageError


def read_or_none(backend: Backend, key: str) -> bytes | None:
    """The key's bytes; None when it is not there."""
    try:
        return backend.read(key)
    except KeyNotFoundError:
        return None


def publish_or_doubt(backend: Backend, key: str, data: bytes) -> None:
    """Publish `data`; an error means that the old bytes are there and stay, unless it is a CommitUncertainError."""
    try:
        backend.publish(key, data)
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
