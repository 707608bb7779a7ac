"""Storage writers that a background worker can import."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import hpdcp
from hpdcp import Metadata
from hpdcp._base.backend import Backend
from hpdcp._base.errors import StorageError
from hpdcp._plan.storage import WriteResults


class UnmountedWriter(hpdcp.FileSystemWriter):
    """Reaches its location in the trainer, and not in the trainer's worker."""

    def open_location(self) -> Backend:
        if "hpdcp._background.worker" in sys.orig_argv:
            raise StorageError("no such mount here")
        return super().open_location()


class LastWriter(hpdcp.FileSystemWriter):
    """Its worker is killed the moment it has published the checkpoint."""

    def finalize_checkpoint(self, metadata: Metadata, results: Sequence[WriteResults]) -> Metadata:
        super().finalize_checkpoint(metadata, results)
        assert "hpdcp._background.worker" in sys.orig_argv
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")
