"""The files beside a model's weights (config, tokenizer, templates, code), copied from one store to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._convert._location import Location
from hpdcp._files.links import check_links

_BLOCK_BYTES: Final = 8 << 20

_WEIGHTS: Final = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf",
    ".ggml", ".tflite", ".ot", ".npz", ".npy", ".pkl", ".pickle", ".tar", ".metadata", ".bytes",
)  # fmt: skip
"""Ends of names of weights, in all formats that model folders hold, and of checkpoints: never copied."""


@dataclass(frozen=True)
class AuxiliaryFiles:
    """The auxiliary files of one folder."""

    folder: Location | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Key → bytes."""

    @classmethod
    def find(cls, folder: Location | None, *, leave_out: Location) -> AuxiliaryFiles:
        """Those of `folder`, sub-folders too, but not what lies in the folder `leave_out`; none where that is None.

        Hidden files are none.

        Raises:
            CorruptCheckpointError: one is a link that leads out of the folder.
        """
        if folder is None:
            return cls()
        inside = leave_out.url.removeprefix(folder.url.rstrip("/") + "/")
        excluded = "" if inside == leave_out.url else f"{inside}/"
        with closing(folder.open()) as backend:
            listing = backend.list_keys(recursive=True)
        sizes = {
            info.key: info.size
            for info in listing
            if not info.key.lower().endswith(_WEIGHTS)
            and not any(part.startswith(".") for part in info.key.split("/"))
            and not (excluded and info.key.startswith(excluded))
        }
        check_links(folder.url, sizes)
        return cls(folder, sizes)

    def copy_to(self, target: Backend) -> None:
        """Copy each, replacing what is there."""
        if self.folder is None or not self.sizes:
            return
        with closing(self.folder.open()) as source:
            for key, size in self.sizes.items():
                target.write(key, _blocks(source, key, size), size=size, exclusive=False)


def _blocks(source: Backend, key: str, size: int) -> Iterator[memoryview]:
    # Fresh memory for each: a store may hold on to many of them until the upload ends.
    for start in range(0, size, _BLOCK_BYTES):
        block = memoryview(bytearray(min(_BLOCK_BYTES, size - start)))
        source.read_ranges(key, [ByteRange(start, len(block))], [block])
        yield block
