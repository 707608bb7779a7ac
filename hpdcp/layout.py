"""The contract of how tensors become files; `hpdcp.testing.LayoutContract` tests one."""

from hpdcp._files.layout import (
    FileNaming,
    Layout,
    Verify,
)

__all__ = [
    "FileNaming",
    "Layout",
    "Verify",
]
