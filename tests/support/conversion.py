"""Convert a model larger than the memory that a conversion may take, and say how much it took.

    python -m tests.support.conversion {to-dcp,to-hf,to-torch,from-torch} SRC DST [BACKEND]

Prints the peak of anonymous resident memory above what it was after the imports, in bytes. `SRC` of `to-dcp` is made by
`write_sparse_model`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hpdcp import offline_transform
from hpdcp._base import config
from tests.support import backends

MARK_EVERY = 8 << 20
"""Bytes between two marks in the data of a sparse model."""


def write_sparse_model(folder: Path, shapes: Sequence[tuple[int, ...]]) -> int:
    """A Hugging Face folder of bfloat16 tensors that takes little room on disk; how many bytes its tensors have.

    Zeros but for a number here and there, so that a block in the wrong place shows.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for number, shape in enumerate(shapes):
        nbytes = torch.Size(shape).numel() * 2
        header[f"layers.{number}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for offset in range(0, end - 8, MARK_EVERY):
            file.seek(start + offset)
            file.write((offset + 1).to_bytes(8, "little"))
        file.truncate(start + end)
    return end


class Peak:
    """The most anonymous resident memory this process had while it was watched, above what it had then."""

    def __init__(self) -> None:
        self.bytes = 0


@contextlib.contextmanager
def watched() -> Iterator[Peak]:
    """Sample this process's memory until the block ends."""
    peak, before, done = Peak(), anonymous_bytes(), threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            peak.bytes = max(peak.bytes, anonymous_bytes() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def anonymous_bytes() -> int:
    """Resident memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main(direction: str, src: str, dst: str, backend: str = "auto") -> None:
    """Convert, and print the peak."""
    import huggingface_hub  # noqa: F401  # its import is not the conversion's

    with backends.registered(), config.using(backend=backend), watched() as peak:
        if direction == "to-dcp":
            offline_transform.convert_full_checkpoint_to_dcp(src, dst)
        elif direction == "to-hf":
            offline_transform.convert_dcp_to_huggingface(src, dst, max_shard_size="400MB")
        elif direction == "to-torch":
            offline_transform.convert_dcp_to_torch(src, dst)
        else:
            offline_transform.convert_full_checkpoint_to_dcp(src, dst, "torch")
    print(f"PEAK {peak.bytes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
