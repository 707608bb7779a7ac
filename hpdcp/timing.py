"""Stage times: one log line and one trace event per stage of a save or a load, per rank."""

from hpdcp._base.timing import (
    configure_logging,
    current_rank,
    stage,
    timed,
)

__all__ = [
    "configure_logging",
    "current_rank",
    "stage",
    "timed",
]
