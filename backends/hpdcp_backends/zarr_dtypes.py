"""Data types of ml_dtypes for zarr-python, which itself knows numpy's alone.

    import zarr
    from hpdcp_backends import zarr_dtypes

    zarr_dtypes.register()
    zarr.open_group("step_1000")["model"]["norm.weight"][...]     # an array of ml_dtypes.bfloat16

They are also declared as entry points, which zarr-python 3.1.6 collects and never loads. A version that does load them
does so in programs that have nothing to do with hpdcp as well: so nothing here fails to import, and without ml_dtypes
no data type matches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self, TypeGuard

import numpy as np
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

try:
    import ml_dtypes as _ml_dtypes
except ImportError:
    _floats: Any = None
else:
    _floats = _ml_dtypes


@dataclass(frozen=True, kw_only=True)
class _MlFloat(ZDType[Any, Any]):
    """A floating-point type of ml_dtypes, by the name that zarr's registry of extensions has for it."""

    dtype_cls: ClassVar[type[Any]] = np.dtype

    endianness: Literal["little"] = "little"

    @classmethod
    def _native(cls) -> np.dtype[Any]:
        found: Any = getattr(_floats, cls._zarr_v3_name, None)
        if found is None:
            raise DataTypeValidationError(f'{cls._zarr_v3_name} needs ml_dtypes: pip install "hpdcp[zarr]".')
        native: np.dtype[Any] = np.dtype(found)
        return native

    @property
    def item_size(self) -> int:
        return self._native().itemsize

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> TypeGuard[Any]:
        return bool(dtype == cls._native())

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if cls._check_native_dtype(dtype):
            return cls()
        raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}.")

    def to_native_dtype(self) -> Any:
        return self._native()

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        name = data.get("name") if isinstance(data, Mapping) else data
        if name == cls._zarr_v3_name:
            cls._native()
            return cls()
        raise DataTypeValidationError(f"{name!r} is not {cls._zarr_v3_name!r}.")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        return cls._from_json_v2(data)

    def to_json(self, zarr_format: Any) -> Any:
        name = self._zarr_v3_name
        return {"name": name, "object_codec_id": None} if zarr_format == 2 else name

    def _check_scalar(self, data: object) -> bool:
        try:
            self._native().type(data)
        except (TypeError, ValueError):
            return False
        return True

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is no {self._zarr_v3_name}.")
        return self._native().type(data)

    def default_scalar(self) -> Any:
        return self._native().type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        if isinstance(data, str) and data.startswith("0x"):
            raw = int(data, 16).to_bytes(self.item_size, "little")
            return np.frombuffer(raw, dtype=self._native())[0]
        named = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
        return self.cast_scalar(named.get(data, data) if isinstance(data, str) else data)

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:
        value = float(self.cast_scalar(data))
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value


class BFloat16(_MlFloat):
    _zarr_v3_name = "bfloat16"


class Float8E4M3FN(_MlFloat):
    _zarr_v3_name = "float8_e4m3fn"


class Float8E4M3FNUZ(_MlFloat):
    _zarr_v3_name = "float8_e4m3fnuz"


class Float8E5M2(_MlFloat):
    _zarr_v3_name = "float8_e5m2"


class Float8E5M2FNUZ(_MlFloat):
    _zarr_v3_name = "float8_e5m2fnuz"


class Float8E8M0FNU(_MlFloat):
    _zarr_v3_name = "float8_e8m0fnu"

    def default_scalar(self) -> Any:
        # It has no zero: its least number stands for it.
        return self._native().type(2.0**-127)


_ALL: Final = (BFloat16, Float8E4M3FN, Float8E4M3FNUZ, Float8E5M2, Float8E5M2FNUZ, Float8E8M0FNU)


def register() -> None:
    """Have zarr-python open arrays of these types in this process, from now on; twice is fine."""
    for kind in _ALL:
        data_type_registry.register(kind._zarr_v3_name, kind)
