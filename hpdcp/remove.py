"""Remove a checkpoint and nothing else."""

from hpdcp._manage.remove import (
    Removal,
    remove_checkpoint,
)

__all__ = [
    "Removal",
    "remove_checkpoint",
]
