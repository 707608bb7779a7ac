"""The checksum over a whole metadata file, which stands at a fixed place in its header.

    {"__metadata__":{"checksum":"1a2b3c4d", ...

crc32c as 8 hexadecimal digits, of the file with 8 zeros in their place. Files of format 1.0 have none.
"""

from __future__ import annotations

from typing import Final

import crc32c

from hpdcp._format.container import PREFIX_BYTES, Buffer

UNSEALED: Final = "00000000"
"""What stands in place of the checksum while it is taken."""
_BEFORE: Final = b'{"__metadata__":{"checksum":"'
_START: Final = PREFIX_BYTES + len(_BEFORE)
_STOP: Final = _START + len(UNSEALED)


def sealed(data: bytes) -> bytes:
    """`data`, whose first setting is the checksum `UNSEALED`, with its checksum there."""
    assert has_seal(data)
    return b"".join([data[:_START], _digits(data), data[_STOP:]])


def has_seal(data: Buffer) -> bool:
    """Whether a checksum stands in the file's header."""
    return bytes(data[PREFIX_BYTES:_START]) == _BEFORE


def is_intact(data: Buffer) -> bool:
    """Whether a file that has a checksum is what it was."""
    return bytes(data[_START:_STOP]) == _digits(data)


def _digits(data: Buffer) -> bytes:
    view = memoryview(data)
    crc = crc32c.crc32c(view[_STOP:], crc32c.crc32c(UNSEALED.encode(), crc32c.crc32c(view[:_START])))
    return f"{crc:08x}".encode()
