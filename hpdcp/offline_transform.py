"""Conversion between checkpoints, Hugging Face folders and files of torch, on any two stores."""

from hpdcp._convert.copy import (
    convert_dcp_to_dcp,
)
from hpdcp._convert.transform import (
    Conversion,
    convert_dcp_to_huggingface,
    convert_dcp_to_torch,
    convert_full_checkpoint_to_dcp,
    dcp_to_full_state_dict,
    full_state_dict_to_dcp_format,
    parse_checkpoint_from_huggingface,
    save_state_dict_as_huggingface_format,
)

__all__ = [
    "Conversion",
    "convert_dcp_to_dcp",
    "convert_dcp_to_huggingface",
    "convert_dcp_to_torch",
    "convert_full_checkpoint_to_dcp",
    "dcp_to_full_state_dict",
    "full_state_dict_to_dcp_format",
    "parse_checkpoint_from_huggingface",
    "save_state_dict_as_huggingface_format",
]
