"""Several runs of a job in one process."""

from __future__ import annotations

from hpdcp._files import save_identity


def begin_run() -> None:
    """Count saves without collectives from one, as a job does that starts."""
    save_identity._ordinals.clear()
