"""Bars for long work, on the stderr of rank 0."""

from hpdcp._base.progress import (
    STEP_BYTES,
    Bar,
    bar,
    check,
    counted,
)

__all__ = [
    "Bar",
    "STEP_BYTES",
    "bar",
    "check",
    "counted",
]
