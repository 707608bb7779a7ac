"""What `async_save` returns: a save that goes on in the background, and how it went."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from hpdcp._base.backend import without_password
from hpdcp._base.errors import WaitTimeoutError
from hpdcp._format.metadata import Metadata


class AsyncSaveResponse:
    """One save that goes on in the background."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.asked = False
        """Whether somebody has asked how it went."""
        self.future: Future[Metadata] = _Watched(self)
        # It cannot be cancelled: other ranks count on this one's part.
        self.future.set_running_or_notify_cancel()

    @property
    def persist_completion(self) -> Future[Metadata]:
        """Done once the checkpoint is published, or has failed."""
        return self.future

    def get_result(self, timeout: float | None = None) -> Metadata:
        """What was published, once it is.

        Raises:
            WaitTimeoutError: not within `timeout` seconds; the save goes on.
            HpdcpError: what went wrong in the worker, a killed worker included.
        """
        try:
            return self.future.result(timeout)
        except FutureTimeoutError as error:
            if self.future.done():
                raise
            raise WaitTimeoutError(
                f"the save to {self.checkpoint} is not done after {timeout} s; it goes on. Wait longer, or look "
                "at the storage."
            ) from error

    def done(self) -> bool:
        """Whether it is published or has failed."""
        return self.future.done()

    def __repr__(self) -> str:
        state = "in flight"
        if self.future.done():
            # Not the watched one: to print it is not to ask how it went.
            failure = Future.exception(self.future, 0)
            state = "published" if failure is None else f"failed: {type(failure).__name__}"
        return f"<AsyncSaveResponse of {without_password(self.checkpoint)}: {state}>"


class _Watched(Future[Metadata]):
    """Notes that somebody asked how the save went, so that a failure nobody saw can be told apart."""

    def __init__(self, response: AsyncSaveResponse) -> None:
        super().__init__()
        self._response = response

    def result(self, timeout: float | None = None) -> Metadata:
        found = super().exception(timeout)
        self._response.asked = True
        return super().result(0) if found is None else _raise(found)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self._response.asked = True
        return found


def _raise(error: BaseException) -> Metadata:
    raise error
