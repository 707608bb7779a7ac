"""The files beside a model's weights (config, tokenizer, templates, code), copied from one store to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hpdcp._base.backend import Backend, ByteRange

PIECE_BYTES: Final = 8 << 20

_WEIGHTS: Final = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf",
    ".ggml", ".tflite", ".ot", ".npz", ".npy", ".pkl", ".pickle", ".tar", ".metadata", ".bytes",
)  # fmt: skip
"""Ends of names of weights, in all formats that model folders hold, and of checkpoints: never copied."""


def side_files(backend: Backend, *, but: str = "") -> dict[str, int]:
    """What belongs beside the weights of a folder, sub-folders too: key → size. Hidden files do not, nor what lies
    under `but`."""
    return {
        info.key: info.size
        for info in backend.list_keys(recursive=True)
        if not info.key.lower().endswith(_WEIGHTS)
        and not any(part.startswith(".") for part in info.key.split("/"))
        and not (but and info.key.startswith(f"{but}/"))
    }


def copy_files(source: Backend, target: Backend, files: dict[str, int]) -> None:
    """Each of `files` of one store to the other, replacing what is there."""
    for key, size in files.items():
        target.write(key, _pieces(source, key, size), size=size, exclusive=False)


def _pieces(source: Backend, key: str, size: int) -> Iterator[memoryview]:
    for start in range(0, size, PIECE_BYTES):
        piece = memoryview(bytearray(min(PIECE_BYTES, size - start)))
        source.read_ranges(key, [ByteRange(start, len(piece))], [piece])
        yield piece
