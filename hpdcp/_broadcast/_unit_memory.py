"""The memory that a broadcast reads into, sends from and receives into on one rank."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._broadcast._units import Unit
from hpdcp._devices import buffers, device
from hpdcp._format.metadata import MetadataIndex
from hpdcp._plan.load_plan import LoadPlan, ReadItem
from hpdcp._plan.read_targets import ReadTargets, acquire_tensors, apply_tensors
from hpdcp._plan.shared_boxes import SharedBox
from hpdcp._plan.storage import StorageReader
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.views import view_of_box

_TAIL_BYTES: Final = 16
"""At the end of a batch, its first byte the status; a multiple of every element's size."""


class TargetsInTurn:
    """Targets that are asked for by one thread at a time: those that read ahead and the one that receives."""

    def __init__(self, targets: ReadTargets) -> None:
        self._targets = targets
        self._turn = threading.Lock()

    def acquire(self, items: Sequence[ReadItem]) -> list[torch.Tensor]:
        """The memory of each item."""
        with self._turn:
            return list(acquire_tensors(self._targets, items))

    def apply(self, items: Sequence[ReadItem], tensors: Sequence[torch.Tensor]) -> None:
        """Say that these are filled."""
        with self._turn:
            apply_tensors(self._targets, items, tensors)


class UnitMemory:
    """The bytes of one unit on this rank: straight in the target, or in a buffer of the wire's shape.

    What goes from device to device is read into a buffer on the host all the same, and brought to the device when it is
    its turn: so the device holds the buffers that are in flight, and none that were read ahead.
    """

    def __init__(self, unit: Unit, targets: TargetsInTurn) -> None:
        self._unit = unit
        self._targets = targets
        self._items: list[ReadItem] = []
        self._tensors: list[torch.Tensor] = []
        """The target of each box."""
        self._on_host: torch.Tensor | None = None
        self._on_device: torch.Tensor | None = None

    def allocate(self, *, receives: bool) -> None:
        """Take the memory that the bytes go to, as a rank that receives them or as the one that reads them.

        Raises:
            InvalidArgumentError: the planner gave memory of another shape.
        """
        unit = self._unit
        self._items = [_item_of(box) for box in unit.boxes]
        tensors = self._targets.acquire(self._items)
        for box, tensor in zip(unit.boxes, tensors, strict=True):
            if tuple(tensor.shape) != box.sizes:
                raise InvalidArgumentError(
                    f"{box.index.fqn!r}: the planner's acquire_tensor gave a tensor of shape {list(tensor.shape)} for "
                    f"a box of sizes {list(box.sizes)}."
                )
        self._tensors = tensors
        if unit.batch or not (unit.boxes[0].info.direct and _can_receive(tensors[0], unit.boxes[0], unit.on_device)):
            if receives and unit.on_device:
                self._on_device = buffers.device_buffer(self._size)
                return
            self._make_buffer()

    def read(self, reader: StorageReader, items: Mapping[MetadataIndex, Sequence[ReadItem]]) -> None:
        """Fill the buffer, or the target itself, from storage; `items` are this rank's, by destination chunk."""
        self.allocate(receives=False)
        wanted: list[ReadItem] = []
        memory: _Memory = {}
        for box, view in zip(self._unit.boxes, self._views(self._on_host), strict=True):
            for item in cut_items(items[box.index], box.offsets, box.sizes):
                begin = tuple(a - b for a, b in zip(item.dest_offsets, box.offsets, strict=True))
                memory[item.dest_index, item.dest_offsets, item.lengths] = view_of_box(view, begin, item.lengths)
                wanted.append(item)
        reader.execute_read(LoadPlan.build(wanted), _BufferTargets(memory))

    def wire(self) -> torch.Tensor:
        """What is sent or received, as one flat tensor of the transport dtype."""
        dtype = dtype_of(self._unit.transport)
        if self._on_host is None and self._on_device is None:
            if self._tensors:
                return self._tensors[0].detach().view(-1).view(dtype)
            # Nothing could be acquired here; the walk goes on with bytes that nobody looks at.
            self._make_buffer()
        if self._unit.on_device and self._on_device is None:
            assert self._on_host is not None
            self._on_device = buffers.to_device(self._size, self._on_host)
        wire = self._on_host if self._on_device is None else self._on_device
        assert wire is not None
        return wire.view(dtype)

    def deliver(self) -> None:
        """Put what was received into the targets."""
        received = self._on_host if self._on_device is None else self._on_device
        if received is not None and self._tensors:
            views = self._views(received)
            alike = [
                tensor.dtype == view.dtype and tensor.device == view.device
                for tensor, view in zip(self._tensors, views, strict=True)
            ]
            if self._unit.batch and all(alike) and self._unit.stored == self._unit.transport:
                torch._foreach_copy_([tensor.detach() for tensor in self._tensors], views)
            else:
                for tensor, view in zip(self._tensors, views, strict=True):
                    device.copy_into(tensor, view)
        self._targets.apply(self._items, self._tensors)

    def set_status(self, failed: bool) -> None:
        """Let a batch tell its receivers whether its bytes are good."""
        if self._unit.batch and self._on_host is None:
            self._make_buffer()
        if self._unit.batch and self._on_host is not None:
            self._on_host[self._unit.nbytes] = int(failed)

    def has_failed(self) -> bool:
        """Whether the batch's reader rank said that it failed."""
        received = self._on_host if self._on_device is None else self._on_device
        return received is None or bool(received[self._unit.nbytes].item())

    @property
    def _size(self) -> int:
        return self._unit.nbytes + (_TAIL_BYTES if self._unit.batch else 0)

    def _make_buffer(self) -> None:
        for_device = self._unit.on_device or any(not device.is_host(tensor) for tensor in self._tensors)
        self._on_host = buffers.host_buffer(self._size, for_device=for_device)
        if self._unit.batch:
            self._on_host[self._unit.nbytes :] = 0

    def _views(self, buffer: torch.Tensor | None) -> list[torch.Tensor]:
        """Where each box lies in the buffer, or the target itself, in the stored dtype."""
        if buffer is None:
            return [tensor.detach() for tensor in self._tensors]
        unit = self._unit
        flat = buffer[: unit.nbytes].view(dtype_of(unit.stored)).split_with_sizes(unit.counts)
        return [elements.view(box.sizes) for elements, box in zip(flat, unit.boxes, strict=True)]


def _item_of(box: SharedBox) -> ReadItem:
    """A box to fill, wherever its bytes come from."""
    nowhere = (0,) * len(box.sizes)
    return ReadItem(box.index, -1, box.offsets, nowhere, box.sizes)


def _can_receive(target: torch.Tensor, box: SharedBox, on_device: bool) -> bool:
    """Whether the box's bytes, as they are stored, are what the target's memory is to hold."""
    return (
        (device.is_current(target) if on_device else device.is_host(target))
        and target.is_contiguous()
        and target.dtype == dtype_of(box.stored_dtype)
        and not (target.is_conj() or target.is_neg())
    )


def cut_items(items: Sequence[ReadItem], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[ReadItem]:
    """What `items`, all of one destination chunk, contribute to the box of it at `offsets`."""
    found = []
    for item in items:
        low = tuple(map(max, item.dest_offsets, offsets))
        ends = zip(item.dest_offsets, item.lengths, offsets, sizes, strict=True)
        lengths = tuple(min(a + an, b + bn) - at for (a, an, b, bn), at in zip(ends, low, strict=True))
        if all(length > 0 for length in lengths):
            begins = zip(item.storage_offsets, low, item.dest_offsets, strict=True)
            moved = tuple(s + at - a for s, at, a in begins)
            found.append(ReadItem(item.dest_index, item.storage_row, low, moved, lengths, item.kind))
    return found


_Memory: TypeAlias = dict[tuple[MetadataIndex, tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""Where boxes go, by destination chunk, offsets and sizes: stored boxes may overlap, and begin at one point."""


class _BufferTargets:
    """Lets a reader fill buffers that are not targets yet."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        return self._memory[item.dest_index, item.dest_offsets, item.lengths]

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        return

    def apply_bytes(self, item: ReadItem, data: bytes) -> None:
        raise AssertionError("objects are never broadcast")
