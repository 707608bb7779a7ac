"""Which backend and which layout a location gets."""

from hpdcp._files.registry import (
    open_backend,
    open_layout,
    resolve_checkpoint_id,
)

__all__ = [
    "open_backend",
    "open_layout",
    "resolve_checkpoint_id",
]
