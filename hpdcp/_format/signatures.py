"""What a file is, told by its first bytes: for messages about files that hpdcp did not write."""

from __future__ import annotations

from typing import Final

PICKLE: Final = b"\x80"
"""How every pickle of protocol 2 and later begins; torch.distributed.checkpoint's `.metadata` is one."""
ZIP: Final = b"PK\x03\x04"

TORCH_READS: Final = (
    "Given its folder, hpdcp.load reads a whole checkpoint of it, and "
    'hpdcp.offline_transform.convert_full_checkpoint_to_dcp(..., src_platform="torch") makes one of hpdcp of it.'
)
"""What to do with a checkpoint of torch.distributed.checkpoint."""

_SIGNATURES: Final[tuple[tuple[bytes, str], ...]] = (
    (ZIP, "a zip file, as torch.save writes"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy file"),
    (b"GGUF", "a GGUF file"),
    (b"{", "a JSON file"),
)
_PROTOCOLS: Final = range(2, 6)


def is_pickle(head: bytes | bytearray | memoryview) -> bool:
    """Whether the bytes begin as a pickle does and a safetensors container does not, whose JSON starts at byte 8."""
    start = bytes(head[:9])
    return start[:1] == PICKLE and len(start) > 1 and start[1] in _PROTOCOLS and start[8:] != b"{"


def told_by(head: bytes | bytearray | memoryview) -> str:
    """What begins so, with its article, such as "a zip file"; empty for what has no signature that is known here."""
    if is_pickle(head):
        return "a pickle, as torch.distributed.checkpoint writes its metadata"
    start = bytes(head[:8])
    return next((name for signature, name in _SIGNATURES if start.startswith(signature)), "")
