"""A façade of what people use beside the verbs; everything lives elsewhere."""

from hpdcp.tree import flatten_state_dict, unflatten_state_dict

__all__ = ["flatten_state_dict", "unflatten_state_dict"]
