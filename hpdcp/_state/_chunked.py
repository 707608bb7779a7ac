"""Tensors of other classes that list the chunks they hold, as torch's own checkpoints ask them to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeGuard, runtime_checkable

import torch


@runtime_checkable
class Chunked(Protocol):
    """What torch's own checkpoints ask of a tensor that holds several chunks."""

    def __create_chunk_list__(self) -> Sequence[_ChunkOnRecord]: ...

    def __get_tensor_shard__(self, index: object) -> torch.Tensor: ...


class _ChunkOnRecord(Protocol):
    offsets: torch.Size
    sizes: torch.Size


def is_chunked(tensor: torch.Tensor) -> TypeGuard[Chunked]:
    """Whether it lists the chunks it holds; asked of the protocol only where the class is not torch's own."""
    return type(tensor) is not torch.Tensor and isinstance(tensor, Chunked)


def filled_shards(source: Chunked, key: str) -> Iterator[tuple[torch.Size, torch.Size, torch.Tensor]]:
    """Offsets, sizes and tensor of every chunk that is not empty."""
    # Only those who hold such tensors pay for the import: torch's wrapper has made it already.
    from torch.distributed.checkpoint.metadata import MetadataIndex

    for number, record in enumerate(source.__create_chunk_list__()):
        # torch's wrapper of no shards reports one empty chunk, of two dimensions whatever the tensor has.
        if 0 not in record.sizes:
            yield record.offsets, record.sizes, source.__get_tensor_shard__(MetadataIndex(key, record.offsets, number))
