"""Whether a checkpoint's bytes are those that were saved."""

from hpdcp._manage.verify import (
    Damage,
    VerifyReport,
    verify_checkpoint,
)

__all__ = [
    "Damage",
    "VerifyReport",
    "verify_checkpoint",
]
