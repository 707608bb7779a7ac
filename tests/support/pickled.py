"""Pickles put together by hand, instruction by instruction, as nobody's pickler writes them; and folders with them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

START = b"\x80\x04"


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def call(module: str, attribute: str, arguments: bytes = b")") -> bytes:
    return name(module, attribute) + arguments + b"R"


@dataclass
class Save:
    """A checkpoint of torch, to be spoiled."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, **tensors: torch.Tensor) -> Save:
        state: dict[str, Any] = tensors or {"w": torch.arange(12.0).reshape(3, 4), "step": 3}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return cls(folder)

    @property
    def data(self) -> bytes:
        return (self.folder / ".metadata").read_bytes()

    def write(self, data: bytes) -> None:
        (self.folder / ".metadata").write_bytes(data)

    def edit(self, change: Callable[[Metadata], object]) -> None:
        """Have torch's own records changed and pickled again."""
        metadata = pickle.loads(self.data)
        change(metadata)
        self.write(pickle.dumps(metadata, protocol=4))

    def edit_item(self, fqn: str, change: Callable[[bytearray], object]) -> None:
        """Have the stored bytes of one name changed in place."""
        places = pickle.loads(self.data).storage_data
        info = next(info for index, info in places.items() if index.fqn == fqn)
        path = self.folder / info.relative_path
        data = bytearray(path.read_bytes())
        item = data[info.offset : info.offset + info.length]
        change(item)
        data[info.offset : info.offset + info.length] = item
        path.write_bytes(data)


def saved(value: object) -> bytes:
    """As torch.save writes it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
