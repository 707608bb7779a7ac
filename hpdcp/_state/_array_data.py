"""numpy arrays that are nothing but their bytes: what describes their dtype, and the bytes themselves."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


class NotTypedError(Exception):
    """A value outside the types that typed JSON has; carries the name of its class."""


def describe(dtype: np.dtype[Any]) -> object:
    """numpy's own description of `dtype`, which gives it back; NotTypedError where none does."""
    if dtype.metadata is None and _is_data(dtype):
        descr: object = np.lib.format.dtype_to_descr(dtype)
        if described(descr) == dtype:
            return descr
    raise NotTypedError(f"numpy array of {dtype}")


def described(descr: Any) -> np.dtype[Any]:
    """The dtype that `describe` described; ValueError or TypeError where it describes none."""
    return np.lib.format.descr_to_dtype(descr)


def _is_data(dtype: np.dtype[Any]) -> bool:
    """Whether its elements are nothing but their bytes on every machine: no objects, foreign types or long doubles."""
    if dtype.subdtype is not None:
        return _is_data(dtype.base)
    if dtype.fields is not None:
        return dtype.type is np.void and dtype.itemsize > 0 and all(_is_data(item[0]) for item in dtype.fields.values())
    if dtype.kind in "SUV":
        return dtype.itemsize > 0 and dtype.isbuiltin != 2 and dtype.type in (np.bytes_, np.str_, np.void)
    return dtype.kind in "biufcmM" and dtype.isbuiltin != 2 and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def array_bytes(array: Array, order: str) -> bytes:
    """The bytes of the elements in `order`; equal arrays give equal bytes."""
    if array.dtype.fields is not None:
        # The padding between fields is whatever was in memory, and would differ between two ranks' equal values.
        clean = np.zeros(array.shape, array.dtype)
        _copy_fields(array, clean)
        array = clean
    return array.tobytes(order="F" if order == "F" else "C")


def _copy_fields(source: Array, target: Array) -> None:
    for name in source.dtype.names or ():
        if target[name].dtype.fields is not None:
            _copy_fields(source[name], target[name])
        else:
            target[name][...] = source[name]
