"""The same action on many files, several at a time where each waits for a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from hpdcp._base.backend import Backend
from hpdcp._base.threads import Threads

_CONCURRENT_FILES: Final = 16
"""Small requests in flight across a network."""

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def for_each_file(backend: Backend, action: Callable[[_Item], _Made], files: Sequence[_Item]) -> list[_Made]:
    """`action` on each of `files`, several at a time across a network."""
    return in_parallel(action, files, threads=_CONCURRENT_FILES if backend.remote else 1)


def in_parallel(
    action: Callable[[_Item], _Made],
    items: Sequence[_Item],
    *,
    threads: int,
    failed: threading.Event | None = None,
) -> list[_Made]:
    """`action` on each of `items`, in order where one thread does it; the first failure is raised.

    `failed` is set on a failure, and on an interrupt, which reaches the calling thread only, before the others are
    waited for.
    """
    if threads <= 1 or len(items) <= 1:
        return [action(item) for item in items]
    with Threads(min(threads, len(items)), "hpdcp-read") as pool:
        try:
            return list(pool.map(action, items))
        except BaseException:
            if failed is not None:
                failed.set()
            pool.shutdown(cancel_futures=True)
            raise
