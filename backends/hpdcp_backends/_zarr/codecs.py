"""Compression of chunks: blosc with zstd, which both zarr-python and tensorstore read."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hpdcp._base.errors import CorruptCheckpointError, InvalidArgumentError, NotSupportedError

COMPRESSORS: Final = ("none", "zstd")
_LEVELS: Final = tuple(map(str, range(10)))
_MOST_PACKED: Final = 1 << 15
"""Bytes that zstd makes of one at most: its shortest block has 4 and stands for 128 KiB."""
_BLOSC_HEADER: Final = struct.Struct("<4xIII")
"""Of a chunk: bytes when it is decompressed, of a block, and of the chunk itself."""
_MOST: Final = (1 << 31) - 17
"""Bytes that blosc takes at a time, less its own header."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How chunks are compressed; none: they are stored as they are."""

    compressor: str = "none"
    level: int = 3
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.compressor not in COMPRESSORS:
            raise InvalidArgumentError(
                f"layout 'zarr': compressor is {self.compressor!r}; expected one of {list(COMPRESSORS)}."
            )
        if type(self.level) is not int or not 0 <= self.level <= 9:
            raise InvalidArgumentError(f"layout 'zarr': level is {self.level!r}; expected a number from 0 to 9.")
        if not isinstance(self.shuffle, bool):
            raise InvalidArgumentError(f"layout 'zarr': shuffle is {self.shuffle!r}; expected true or false.")

    @property
    def settings(self) -> dict[str, str]:
        """As it travels with plans and stands in metadata; nothing where nothing is compressed."""
        if self.compressor == "none":
            return {}
        return {
            "zarr.compressor": self.compressor,
            "zarr.level": str(self.level),
            "zarr.shuffle": str(int(self.shuffle)),
        }

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Compression | None:
        """What `settings` say; None where nothing is compressed."""
        name = settings.get("zarr.compressor")
        if name is None:
            return None
        level = settings.get("zarr.level", "3")
        if name not in COMPRESSORS or level not in _LEVELS:
            raise CorruptCheckpointError(
                f"the metadata says that chunks are compressed by {name[:40]!r} at level {level[:40]!r}, which this "
                "layout does not do: it is damaged. Load another checkpoint."
            )
        return cls(name, int(level), settings.get("zarr.shuffle") != "0")

    def document(self, itemsize: int) -> dict[str, object]:
        """The codec, as an array's document names it."""
        configuration = {
            "cname": self.compressor,
            "clevel": self.level,
            "shuffle": "shuffle" if self._shuffles(itemsize) else "noshuffle",
            "typesize": itemsize,
            "blocksize": 0,
        }
        return {"name": "blosc", "configuration": configuration}

    def encode(self, data: npt.NDArray[np.uint8], itemsize: int) -> memoryview:
        """The bytes of elements of `itemsize` bytes, compressed."""
        if len(data) > _MOST:
            raise NotSupportedError(
                f"a chunk of {len(data)} bytes is too large to be compressed (2 GiB at most): its tensor is held in "
                "boxes that cannot be cut evenly. Save it uncompressed, or shard it."
            )
        wide = data.view(f"u{itemsize}") if itemsize in (1, 2, 4, 8) and len(data) % itemsize == 0 else data
        codec = _blosc()(
            cname=self.compressor, clevel=self.level, shuffle=1 if self._shuffles(itemsize) else 0, blocksize=0
        )
        return memoryview(codec.encode(wide))

    def _shuffles(self, itemsize: int) -> bool:
        return self.shuffle and itemsize > 1


def decode(data: bytearray, into: npt.NDArray[np.uint8]) -> None:
    """Fill `into` with what `encode` was given; ValueError where `data` is not that."""
    # Before anything is decompressed: the codec allocates what the header claims.
    if len(data) < _BLOSC_HEADER.size:
        raise ValueError(f"it has {len(data)} bytes, fewer than a header")
    claimed, _, length = _BLOSC_HEADER.unpack_from(data)
    if claimed != len(into) or length != len(data) or claimed > len(data) * _MOST_PACKED:
        raise ValueError(
            f"it claims to be {claimed} bytes in {length}; it has {len(data)}, and {len(into)} are expected"
        )
    try:
        _blosc()().decode(data, out=into)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"it cannot be decompressed ({error})") from error


def _blosc() -> Any:
    try:
        from numcodecs import Blosc  # type: ignore[import-untyped]  # only where something is compressed
    except ImportError as error:
        raise NotSupportedError(
            f'chunks compressed with zstd need numcodecs: {error}. Install it: pip install "hpdcp[zarr]".'
        ) from error
    return Blosc
