"""Conversion between checkpoints, Hugging Face folders and files of torch, on any two stores."""

from hpdcp._convert.conversion import (
    Conversion,
)
from hpdcp._convert.copy import (
    convert_dcp_to_dcp,
)
from hpdcp._convert.to_checkpoint import (
    convert_full_checkpoint_to_dcp,
    full_state_dict_to_dcp_format,
)
from hpdcp._convert.to_huggingface import (
    convert_dcp_to_huggingface,
    save_state_dict_as_huggingface_format,
)
from hpdcp._convert.to_state_dict import (
    dcp_to_full_state_dict,
    parse_checkpoint_from_huggingface,
)
from hpdcp._convert.to_torch_file import (
    convert_dcp_to_torch,
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
