"""Saves that go on while training does."""

from hpdcp._background.async_save import (
    async_save,
    start_async_worker,
    wait_for_saves,
)
from hpdcp._background.data_copier import (
    DataCopier,
)
from hpdcp._background.response import (
    AsyncSaveResponse,
)

__all__ = [
    "AsyncSaveResponse",
    "DataCopier",
    "async_save",
    "start_async_worker",
    "wait_for_saves",
]
