"""Whether two checkpoints hold the same."""

from hpdcp._manage.compare import (
    ARRANGEMENT,
    Aspect,
    Comparison,
    Difference,
    ValueDifference,
    compare_checkpoints,
)

__all__ = [
    "ARRANGEMENT",
    "Aspect",
    "Comparison",
    "Difference",
    "ValueDifference",
    "compare_checkpoints",
]
