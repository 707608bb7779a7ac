"""What torch's stream extensions did to items, undone: zstd is the one that torch brings."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

from hpdcp._base.errors import CorruptCheckpointError, NotSupportedError

_ZSTD: Final = "stream.zstd"
_VERSION: Final = "1"
_ROOM: Final = 1 << 20
"""What a file of torch.save has around its elements, with room to spare."""
_MOST_OF_A_VALUE: Final = 1000
"""How many times its compressed length a Python value may have."""


def check_transforms(fqn: str, transforms: Sequence[str]) -> None:
    """Raise unless all of them can be undone here.

    Raises:
        NotSupportedError: names the transform, or the package that undoes it.
    """
    for each in transforms:
        name, _, version = each.partition("/")
        if name != _ZSTD or version.partition(".")[0] != _VERSION:
            raise NotSupportedError(
                f"{fqn!r} was saved through torch's stream extension {each!r}; hpdcp undoes '{_ZSTD}/{_VERSION}'. Load "
                "it with torch and the extension it was saved with, and save it with hpdcp."
            )
        _zstandard(fqn)


def undone(data: bytes | bytearray, transforms: Sequence[str], *, key: str, expected: int) -> bytes:
    """The item as torch.save wrote it; `expected` is how many bytes its elements have, 0 for a Python value.

    Raises:
        CorruptCheckpointError: it cannot be undone, or becomes far larger than expected.
        NotSupportedError: as `check_transforms`.
    """
    found = bytes(data)
    for each in transforms:
        check_transforms(key, [each])
        most = (expected or len(found) * _MOST_OF_A_VALUE) + _ROOM
        zstandard = _zstandard(key)
        try:
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(found), read_across_frames=True) as stream:
                found = stream.read(most + 1)
        except zstandard.ZstdError as error:
            raise CorruptCheckpointError(f"the stored bytes of {key!r} are damaged: {error}.") from None
        if len(found) > most:
            raise CorruptCheckpointError(
                f"the stored bytes of {key!r} become more than {most} when they are decompressed: they are damaged, or "
                "made to fill memory."
            )
    return found


def _zstandard(fqn: str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise NotSupportedError(
            f'{fqn!r} was compressed with zstd, which needs zstandard: {error}. Install it: pip install "hpdcp[zstd]".'
        ) from error
    return zstandard
