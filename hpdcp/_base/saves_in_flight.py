"""Which locations this process is saving to in the background, so that whoever uses one can wait for it first.

The saves register themselves; what reads, replaces or removes a location waits, and need not know how they are made.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from hpdcp._base.timing import log_message

_changed: Final = threading.Condition()
_in_flight: Final[dict[str, int]] = {}
"""URL of a location, as its backend names it → saves in flight there."""


class SaveToLocation:
    """One save in flight to `url`, from when it is made until `end`."""

    def __init__(self, url: str) -> None:
        self._url: str | None = _normal(url)
        with _changed:
            _in_flight[self._url] = _in_flight.get(self._url, 0) + 1

    def end(self) -> None:
        """Nothing more is written to it; idempotent."""
        with _changed:
            url, self._url = self._url, None
            if url is None:
                return
            _in_flight[url] -= 1
            if not _in_flight[url]:
                del _in_flight[url]
            _changed.notify_all()


def wait_for_saves_to(url: str) -> None:
    """Return when no background save of this process to `url` is in flight, however it went.

    `url` is the location as its backend names it, `Backend.url`. Other locations are not waited for. It costs nothing
    where nothing is in flight.
    """
    if not _in_flight:
        return
    url = _normal(url)
    began = time.monotonic()
    with _changed:
        if url not in _in_flight:
            return
        _changed.wait_for(lambda: url not in _in_flight)
    log_message(
        logging.INFO, f"waited {time.monotonic() - began:.4f} seconds for the background save to {url} to complete"
    )


def forget() -> None:
    """In a forked child, which has none of its parent's saves."""
    _in_flight.clear()


def _normal(url: str) -> str:
    return url.rstrip("/")
