"""Several runs of a job in one process."""

from __future__ import annotations

from torch.testing._internal.distributed import fake_pg

from hpdcp._files import save_identity

assert fake_pg  # its import makes the process group "fake" known, in which one process plays the ranks in turn


def begin_run() -> None:
    """Count saves without collectives from one, as a job does that starts."""
    save_identity._ordinals.clear()
