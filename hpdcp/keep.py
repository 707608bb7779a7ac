"""Policies of which checkpoints of a run stay, for `hpdcp.Checkpoints(keep=...)`; `a | b` keeps what either does."""

from hpdcp._manage.retention import (
    Keep,
    best,
    every,
    hours,
    latest,
    where,
)

__all__ = [
    "Keep",
    "latest",
    "every",
    "hours",
    "best",
    "where",
]
