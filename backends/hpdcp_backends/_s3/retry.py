"""When a failed request is sent again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from hpdcp_backends._s3.errors import RequestFailedError, StoppedError

_T = TypeVar("_T")
_LOG: Final = logging.getLogger("hpdcp_backends.s3")
_FIRST_WAIT: Final = 0.2
_LONGEST_WAIT: Final = 10.0
_AT_LEAST: Final = 2
_FIRST_CONTACT_SECONDS: Final = 4.0
"""How long a server that has never answered is tried: a wrong host, port or protocol is told within seconds, and one
that takes connections and is silent after one `read_timeout`."""

_SILENT_SECONDS: Final = 5.0
"""After which a request that is tried again is told of as a warning."""


@dataclass
class Retries:
    """Sends a request again after a temporary failure, with exponential back-off and jitter."""

    most: int
    """Requests after the first one."""
    seconds: float
    """Since the first one, after which none is sent again; two are whatever they take, since a part on a slow link may
    take longer than this by itself."""
    reached: bool = False
    """Whether the server has ever answered."""

    def call(
        self,
        request: Callable[[], _T],
        *,
        stop: threading.Event | None = None,
        doubts: list[RequestFailedError] | None = None,
    ) -> _T:
        """What `request` returns, or the RequestFailedError of its last try.

        Args:
            request: Raises RequestFailedError.
            stop: Ends the waiting, by a StoppedError.
            doubts: Collects failures after which the server may have done what was asked.
        """
        start = time.monotonic()
        for sent in range(self.most + 1):
            if stop is not None and stop.is_set():
                raise StoppedError
            try:
                result = request()
            except RequestFailedError as failure:
                self.reached = self.reached or failure.status is not None
                if doubts is not None and failure.doubtful:
                    doubts.append(failure)
                wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2**sent) * random.uniform(0.5, 1)
                spent = time.monotonic() - start
                limit = self.seconds if self.reached else min(self.seconds, _FIRST_CONTACT_SECONDS)
                late = spent + wait > limit and (sent >= _AT_LEAST or not self.reached)
                if not failure.temporary or sent == self.most or late:
                    raise
                # Of a busy server that is nothing special; of one that is silent somebody wants to hear why he waits.
                told = logging.INFO if self.reached and spent < _SILENT_SECONDS else logging.WARNING
                _LOG.log(told, "S3 request failed after %.1f s (%s); trying again in %.1f s", spent, failure, wait)
                if stop is None:
                    time.sleep(wait)
                elif stop.wait(wait):
                    raise StoppedError from failure
            else:
                self.reached = True
                return result
        raise AssertionError("unreachable")
