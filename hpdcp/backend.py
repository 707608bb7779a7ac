"""The contract of a byte store; `hpdcp.testing.BackendContract` tests one."""

from hpdcp._base.backend import (
    TEMPORARY_PREFIX,
    Backend,
    ByteRange,
    Fetch,
    KeyInfo,
    as_bytes,
    can_be_key,
    check_empty,
    checked_buffers,
    checked_key,
    fetches,
    spare_cores,
    storage_error,
    truncated,
    without_password,
)

__all__ = [
    "Backend",
    "ByteRange",
    "Fetch",
    "KeyInfo",
    "TEMPORARY_PREFIX",
    "as_bytes",
    "can_be_key",
    "check_empty",
    "checked_buffers",
    "checked_key",
    "fetches",
    "spare_cores",
    "storage_error",
    "truncated",
    "without_password",
]
