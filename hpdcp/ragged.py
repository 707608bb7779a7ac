"""`RaggedShard`: ranks own unequal parts of a tensor's leading dimensions."""

from hpdcp._state.ragged import (
    RaggedShard,
    from_local,
)

__all__ = [
    "RaggedShard",
    "from_local",
]
