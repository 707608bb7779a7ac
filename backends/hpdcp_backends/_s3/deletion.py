"""Objects deleted, a thousand by one request where the server can do that."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Final

from hpdcp_backends._s3.client import S3Client
from hpdcp_backends._s3.errors import RequestFailedError
from hpdcp_backends._s3.retry import Retries

_DELETED_AT_ONCE: Final = 1000
_NO_BATCH: Final = frozenset(
    {"NotImplemented", "MethodNotAllowed", "MissingContentMD5", "InvalidRequest", "MalformedXML"}
)
"""Answers of servers that cannot delete many keys by one request, or not by one of botocore's."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ufffe\uffff]")


class Deletion:
    """Deletes objects of one bucket; one that is not there is fine, and one that fails does not keep others."""

    def __init__(self, client: S3Client, retries: Retries) -> None:
        self._client = client
        self._retries = retries

    def delete(self, names: Iterable[str]) -> dict[str, RequestFailedError]:
        """What could not be deleted, and why."""
        together: list[str] = []
        single: list[str] = []
        for name in names:
            (single if _CONTROL.search(name) else together).append(name)  # XML cannot hold these
        failures: dict[str, RequestFailedError] = {}
        for start in range(0, len(together), _DELETED_AT_ONCE):
            failures |= self._delete_batch(together[start : start + _DELETED_AT_ONCE])
        return failures | self._delete_singly(single)

    def _delete_batch(self, names: list[str]) -> dict[str, RequestFailedError]:
        if len(names) == 1:
            return self._delete_singly(names)
        failures: dict[str, RequestFailedError] = {}
        left = names

        def request() -> None:
            nonlocal left
            found = self._client.delete_many(left)
            for name in left:
                failures.pop(name, None)
            failures.update(found)
            left = [name for name, failure in found.items() if failure.temporary]
            if left:
                raise found[left[0]]

        try:
            self._retries.call(request)
        except RequestFailedError as failure:
            if failures:
                return failures
            if failure.code in _NO_BATCH:
                return self._delete_singly(names)
            return dict.fromkeys(names, failure)
        return failures

    def _delete_singly(self, names: list[str]) -> dict[str, RequestFailedError]:
        failures = {}
        for name in names:
            try:
                self._retries.call(partial(self._client.delete, name))
            except RequestFailedError as failure:
                if failure.code != "NoSuchKey":
                    failures[name] = failure
        return failures
