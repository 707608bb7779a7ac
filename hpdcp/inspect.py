"""What a checkpoint holds, from its metadata alone."""

from hpdcp._manage.inspect import (
    CheckpointReport,
    EntryReport,
    FileReport,
    inspect_checkpoint,
)

__all__ = [
    "CheckpointReport",
    "EntryReport",
    "FileReport",
    "inspect_checkpoint",
]
