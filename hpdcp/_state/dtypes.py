"""torch's dtypes by the names that checkpoints record, and back."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from hpdcp._base.errors import UnsupportedTypeError

_BY_NAME: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
)
"""Aliases such as "half" included."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name, without the module.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def find_dtype(name: str) -> torch.dtype | None:
    """The dtype that torch calls `name`; None where this torch has none.

    >>> find_dtype("bfloat16"), find_dtype("float17")
    (torch.bfloat16, None)
    """
    return _BY_NAME.get(name)


def dtype_of(name: str, *, fqn: str | None = None) -> torch.dtype:
    """The dtype that torch calls `name`.

    Raises:
        UnsupportedTypeError: this torch has none; names the tensor `fqn`, where one is given.
    """
    found = _BY_NAME.get(name)
    if found is None:
        what = f"{name!r} is" if fqn is None else f"{fqn!r} is stored as {name},"
        raise UnsupportedTypeError(
            f"{what} a dtype that torch {torch.__version__} does not have. Leave it out, or use a newer torch."
        )
    return found


def itemsize_of(name: str) -> int:
    """Bytes of one element of the dtype that torch calls `name`; 1 where this torch has none, and for no name at all.

    >>> itemsize_of("complex128"), itemsize_of("")
    (16, 1)
    """
    found = _BY_NAME.get(name)
    return 1 if found is None else found.itemsize
