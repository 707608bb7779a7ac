"""Checksums of some bytes of tensors of any device, which are fetched for many tensors at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import torch

from hpdcp._devices import device
from hpdcp._format.checksums import checksum

Span: TypeAlias = tuple[int, int]
"""First byte, and the first one past it, of a tensor's bytes in row-major order; both at elements' borders."""

_BATCH_BYTES: Final = 16 << 20
"""Brought from a device in one copy: samples of some hundred tensors."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size: torch can pick elements of these, and not of every dtype of that size."""


def span_checksums(wanted: Iterable[tuple[torch.Tensor, Sequence[Span]]]) -> list[tuple[int, ...]]:
    """For each tensor the crc32c of each of its spans. Copies what the spans hold at most, and never a whole tensor."""
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[int, torch.Tensor, Sequence[Span]]] = []
    size = 0
    for tensor, spans in wanted:
        tensor = tensor.detach()
        if _is_plain_memory(tensor):
            memory = device.host_bytes(tensor)
            found.append(tuple(checksum(memory[start:stop]) for start, stop in spans))
            continue
        waiting.append((len(found), _bytes_at(tensor, spans), spans))
        found.append(())
        size += len(waiting[-1][1])
        if size >= _BATCH_BYTES:
            _fetch(waiting, found)
            waiting, size = [], 0
    _fetch(waiting, found)
    return found


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return device.is_host(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _fetch(waiting: Sequence[tuple[int, torch.Tensor, Sequence[Span]]], found: list[tuple[int, ...]]) -> None:
    """Set `found` of what waits, which is flat bytes where the tensors are."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor, Sequence[Span]]]] = {}
    for each in waiting:
        by_device.setdefault(each[1].device, []).append(each)
    for group in by_device.values():
        memory = device.host_bytes(device.to_host(_joined([flat for _, flat, _ in group])))
        position = 0
        for row, _, spans in group:
            crcs = []
            for start, stop in spans:
                crcs.append(checksum(memory[position : position + stop - start]))
                position += stop - start
            found[row] = tuple(crcs)


def _bytes_at(tensor: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """What the spans hold, one after another, as flat bytes on the tensor's device."""
    size = tensor.element_size()
    elements = [(start // size, stop // size) for start, stop in spans]
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return _joined([_as_bytes(flat[start:stop]) for start, stop in elements])
    if not (tensor.is_conj() or tensor.is_neg()) and size in _INTEGERS:
        tensor = tensor.view(_INTEGERS[size])
    numbers = torch.cat([torch.arange(start, stop, device="cpu") for start, stop in elements])
    where = tuple(axis.to(tensor.device) for axis in torch.unravel_index(numbers, tensor.shape))
    return _as_bytes(tensor[where])


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all parts in one tensor beside them; by copies, which every device has, unlike `torch.cat`."""
    joined = torch.empty(sum(len(part) for part in parts), dtype=torch.uint8, device=parts[0].device)
    position = 0
    for part in parts:
        joined[position : position + len(part)].copy_(part)
        position += len(part)
    return joined


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    value = flat.resolve_conj().resolve_neg()
    return (torch.view_as_real(value) if value.is_complex() else value).reshape(-1).view(torch.uint8)
