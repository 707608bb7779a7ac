"""What people use beside the verbs."""

from hpdcp._state.tree import (
    flatten_state_dict,
    unflatten_state_dict,
)

__all__ = [
    "flatten_state_dict",
    "unflatten_state_dict",
]
