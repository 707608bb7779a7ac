"""Whether two checkpoints hold the same."""

from hpdcp._manage._value_differences import (
    ValueDifference,
)
from hpdcp._manage.compare import (
    ARRANGEMENT,
    Aspect,
    Comparison,
    Difference,
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
