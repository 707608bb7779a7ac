"""Quantised tensors: codes, that are worth something only together with the scales that lie beside them.

No dtype tells codes from values: float8 holds either. What tells them is the name of their scales, which every tool
writes beside the codes. Until hpdcp multiplies the two, codes are moved and never cast.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from hpdcp._base.errors import CorruptCheckpointError
from hpdcp._state.dtypes import find_dtype

CODES_ADVICE: Final = (
    "Codes are values only once they are multiplied by their scales, which hpdcp does not do: a cast would keep the "
    "codes alone, as wrong as the scales are large or small."
)
"""Why a cast is refused."""

_SEPARATED: Final = "separated_codes"
"""The setting of metadata that says so; of files that something else wrote, under names that a load gave them."""
_SUFFIXES: Final = ("_scale_inv", "_scale", "_scales", ".scale_inv", ".scale", ".scales", ".absmax")
"""After the whole name: DeepSeek, Kimi and Qwen; compressed-tensors, FBGEMM, ModelOpt and Llama; bitsandbytes."""
_WEIGHTS: Final = ("weight", "qweight", "weight_packed")
_SIBLINGS: Final = ("scale", "scales", "scale_inv", "scale_weight", "weight_scale", "SCB")
"""In place of the last part of a weight's name: DeepSeek's inference code; GPTQ, AWQ and MLX; ComfyUI; bitsandbytes."""
_BLOCKS: Final = ("_blocks", "_scales")
"""Of gpt-oss: in place of the end of the name."""
_NARROWEST_VALUE: Final = 2
"""Bytes of the narrowest floating-point dtype that holds values whatever lies beside it."""


def scale_beside(name: str, dtype: str, is_there: Callable[[str], bool]) -> str | None:
    """The name of the scale of a tensor that holds codes; None where it holds values.

    Args:
        dtype: torch's name of it.
        is_there: whether there is a tensor of that name.

    >>> names = {"a.weight_scale_inv", "b.scale", "experts.up_scales"}
    >>> scale_beside("a.weight", "float8_e4m3fn", names.__contains__)
    'a.weight_scale_inv'
    >>> scale_beside("b.weight", "int8", names.__contains__)
    'b.scale'
    >>> scale_beside("experts.up_blocks", "uint8", names.__contains__)
    'experts.up_scales'
    >>> scale_beside("a.weight", "bfloat16", names.__contains__) is None
    True
    """
    if not _may_be_codes(dtype):
        return None
    return next(filter(is_there, _names_of_scales(name)), None)


def separated_codes(settings: Mapping[str, str]) -> dict[str, str]:
    """Name → scale of codes whose names, unlike those in the files, do not lie beside those of their scales.

    Raises:
        CorruptCheckpointError: the settings of the metadata are damaged.
    """
    try:
        found = json.loads(settings.get(_SEPARATED, "{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"the metadata's setting {_SEPARATED!r} is damaged. Load an earlier checkpoint.")
    return found


def separated_codes_setting(scales: Mapping[str, str]) -> dict[str, str]:
    """The setting that `separated_codes` reads; none where there are none."""
    return {_SEPARATED: json.dumps(scales)} if scales else {}


def _may_be_codes(dtype: str) -> bool:
    found = find_dtype(dtype)
    if found is None:  # narrower than any that torch has, such as six bits
        return True
    wide = found.is_complex or (found.is_floating_point and found.itemsize >= _NARROWEST_VALUE)
    return not wide and dtype != "bool"


def _names_of_scales(name: str) -> Iterator[str]:
    for suffix in _SUFFIXES:
        yield name + suffix
    parent, dot, last = name.rpartition(".")
    if last in _WEIGHTS:
        for sibling in _SIBLINGS:
            yield parent + dot + sibling
    if name.endswith(_BLOCKS[0]):
        yield name.removesuffix(_BLOCKS[0]) + _BLOCKS[1]
